"""`LAYERS`: what the families of latent attention bring: their attention, and rotary tables that YaRN stretches."""

from __future__ import annotations

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.family.families.latent import LatentArchitecture
from slime_models.yarn import latent_angles
from torch import Tensor

from slime_megatron.model.family_layers import FamilyLayers
from slime_megatron.model.latent_attention import LatentAttention, LatentAttentionSubmodules
from slime_megatron.model.layer_spec import layer_spec


def latent_layer(config: TransformerConfig, architecture: LatentArchitecture, number: int) -> ModuleSpec:
    """Return slime's layer with latent attention."""
    spec = layer_spec(config, architecture, number)
    spec.submodules.self_attention = ModuleSpec(
        module=LatentAttention,
        params={
            "architecture": architecture,
            "attn_mask_type": AttnMaskType.causal,
        },  # MTP layers ask the specification
        submodules=LatentAttentionSubmodules(),
    )
    return spec


def latent_tables(
    architecture: LatentArchitecture, length: int, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, qk_rope_head_dim] of positions 0 to length - 1, both halves equal."""
    cos, sin = (torch.cat((half, half), dim=-1).to(dtype) for half in latent_angles(architecture, length))
    return cos, sin


LAYERS = FamilyLayers(layer=latent_layer, rotary_tables=latent_tables)
