"""`LAYERS`: what the trainer builds of Qwen 3 Next and Qwen 3.5. Imported when a model is built."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.delta_rule import CHUNK
from slime_models.family.architecture import Architecture
from slime_models.family.families.delta_net import DeltaNetArchitecture

from slime_megatron.batch.trees.flops import forward_flops, seen_pairs
from slime_megatron.batch.trees.token_tree import TokenTree
from slime_megatron.families.delta_net import GatedDeltaNet
from slime_megatron.model.family_layers import FamilyLayers
from slime_megatron.model.layer_spec import layer_spec
from slime_megatron.model.layers.norm import ZeroCenteredNorm


def delta_net_layer(config: TransformerConfig, architecture: Architecture, number: int) -> ModuleSpec:
    """Return slime's layer with norms of 1 + weight, and a delta net in the place of attention where the layer has one."""
    assert isinstance(architecture, DeltaNetArchitecture)
    spec = layer_spec(config, architecture, number)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = ZeroCenteredNorm
    if number in architecture.linear_layers:
        layer.self_attention = ModuleSpec(module=GatedDeltaNet, params={"architecture": architecture})
        return spec
    attention = layer.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = ZeroCenteredNorm
    return spec


def delta_net_config(architecture: Architecture) -> dict[str, Any]:
    """Return what Megatron's configuration has otherwise."""
    return {
        "attention_output_gate": True,
        "hetereogenous_dist_checkpoint": True,  # layers are not alike: checkpoints name each by itself
    }


def delta_net_flops(architecture: Architecture, tree: TokenTree) -> int:
    """Return the FLOPs of a tree's forward pass; those of a delta net are the same for each token."""
    a = architecture
    assert isinstance(a, DeltaNetArchitecture)
    n_linear, n_full = len(a.linear_layers), len(a.full_layers)
    pairs = seen_pairs(tree)
    as_if_full = (
        2
        * n_linear
        * (a.hidden_size * (a.qkv_size + a.query_size) * tree.n_tokens + 2 * a.query_size * pairs)
    )
    gates = 2 * n_full * a.hidden_size * a.query_size * tree.n_tokens
    projections = a.hidden_size * (a.linear_in_size + a.linear_value_size)
    key, value = a.linear_key_head_dim, a.linear_value_head_dim
    # Of each head and token: both triangles of a chunk, its system solved, three products with the state.
    head = CHUNK * key + CHUNK * (key + value) // 2 + CHUNK * value // 2 + 3 * key * value
    each = projections + a.linear_num_value_heads * head + a.linear_qkv_size * a.linear_conv_kernel_dim
    return forward_flops(a, tree) - as_if_full + gates + 2 * n_linear * each * tree.n_tokens


LAYERS = FamilyLayers(
    layer=delta_net_layer, norm=ZeroCenteredNorm, config=delta_net_config, forward_flops=delta_net_flops
)
