"""`LAYERS`: what the families of latent attention bring: their attention."""

from __future__ import annotations

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.family.families.latent_attention.rules import LatentArchitecture

from slime_megatron.families.latent_attention import LatentAttention, LatentAttentionSubmodules
from slime_megatron.model.family_layers import FamilyLayers
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


LAYERS = FamilyLayers(layer=latent_layer)
