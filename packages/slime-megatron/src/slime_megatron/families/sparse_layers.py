"""`LAYERS`: what the families of latent attention with an indexer bring."""

from __future__ import annotations

from functools import partial

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.family.families.latent_attention.sparse import SparseArchitecture

from slime_megatron.batch.trees.flops import forward_flops, seen_pairs
from slime_megatron.batch.trees.token_tree import TokenTree
from slime_megatron.families.latent_attention import LatentAttentionSubmodules
from slime_megatron.families.latent_layers import latent_layer
from slime_megatron.families.sparse_attention import SparseAttention, SparseCoreAttention
from slime_megatron.model.family_layers import FamilyLayers


def sparse_layer(config: TransformerConfig, architecture: SparseArchitecture, number: int) -> ModuleSpec:
    """Return slime's layer with sparse latent attention."""
    spec = latent_layer(config, architecture, number)
    attention = spec.submodules.self_attention
    attention.module = SparseAttention
    attention.submodules = LatentAttentionSubmodules(
        core_attention=partial(SparseCoreAttention, architecture=architecture)
    )
    return spec


def sparse_flops(architecture: SparseArchitecture, tree: TokenTree) -> int:
    """Return the FLOPs of a tree's forward pass: all pairs are computed, and rated by the indexer before."""
    rated = 2 * architecture.num_layers * architecture.index_query_size * seen_pairs(tree)
    return forward_flops(architecture, tree) + rated


LAYERS = FamilyLayers(layer=sparse_layer, forward_flops=sparse_flops)
