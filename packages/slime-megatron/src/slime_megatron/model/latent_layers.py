"""`LAYERS`: what the families of latent attention bring: their attention, and rotary tables that YaRN stretches."""

from __future__ import annotations

import math

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.family.families.latent import LatentArchitecture, YarnScaling
from torch import Tensor

from slime_megatron.batch.rope import inverse_frequencies, tables_of
from slime_megatron.model.family_layers import FamilyLayers
from slime_megatron.model.latent_attention import LatentAttention, LatentAttentionSubmodules
from slime_megatron.model.layer_spec import layer_spec


def latent_layer(config: TransformerConfig, architecture: LatentArchitecture, number: int) -> ModuleSpec:
    """Return slime's layer with latent attention."""
    spec = layer_spec(config, architecture, number)
    spec.submodules.self_attention = ModuleSpec(
        module=LatentAttention,
        params={"architecture": architecture, "attn_mask_type": AttnMaskType.causal},  # MTP layers ask the specification
        submodules=LatentAttentionSubmodules(),
    )
    return spec


def latent_tables(architecture: LatentArchitecture, length: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, qk_rope_head_dim] of positions 0 to length - 1, stretched by YaRN where the model is."""
    frequencies = inverse_frequencies(architecture)
    if (yarn := architecture.yarn) is None:
        return tables_of(frequencies, length, dtype=dtype)
    stretched = _yarn(frequencies, yarn, theta=architecture.rope_theta)
    cos, sin = tables_of(stretched, length, dtype=torch.float32)
    return (cos * yarn.table_factor).to(dtype), (sin * yarn.table_factor).to(dtype)


def _yarn(frequencies: Tensor, yarn: YarnScaling, *, theta: float) -> Tensor:
    """Divide the frequencies that turn seldom within the first context, leave those that turn often, and go over between.

    Source: arXiv 2309.00071, section 3.2; transformers `modeling_rope_utils.py`, `_compute_yarn_parameters`.
    """
    n = len(frequencies)

    def dimension(turns: float) -> float:
        """Return which pair of dimensions turns so often within the first context."""
        return n * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    first, last = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * n - 1)
    width = last - first if last != first else 0.001
    divided = ((torch.arange(n, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / yarn.factor * divided + frequencies * (1 - divided)


LAYERS = FamilyLayers(layer=latent_layer, rotary_tables=latent_tables)
