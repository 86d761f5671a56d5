"""The layers of Gemma 3 in the Megatron trainer. Imported when a model is built."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_megatron.batch.rope import tables_of
from slime_megatron.batch.trees.flops import forward_flops as all_pairs_flops
from slime_megatron.batch.trees.flops import pairs_before_window
from slime_megatron.batch.trees.token_tree import TokenTree
from slime_megatron.model.family_layers import FamilyLayers
from slime_megatron.model.layer_spec import layer_spec
from slime_megatron.model.layers.attention import PackedAttention
from slime_megatron.model.layers.norm import ZeroCenteredNorm
from slime_models.family.rotary import inverse_frequencies
from torch import Tensor

from slime_example_family.family import Gemma3Architecture


def gemma3_layer(config: TransformerConfig, architecture: Gemma3Architecture, number: int) -> ModuleSpec:
    """Return slime's layer with other norms; sliding ones have a window, and the second half of the rotary tables."""
    spec = layer_spec(config, architecture, number)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = ZeroCenteredNorm
    attention.q_layernorm = attention.k_layernorm = ZeroCenteredNorm
    dim = architecture.head_dim
    own: dict[str, Any] = {"rotary_columns": (0, dim)}
    if number in architecture.sliding_layers:
        own = {"window": architecture.sliding_window, "rotary_columns": (dim, 2 * dim)}
    attention.core_attention = partial(PackedAttention, **own)
    return spec


def gemma3_config(architecture: Gemma3Architecture) -> dict[str, Any]:
    """Return what Megatron's configuration has otherwise."""
    return {
        "activation_func": partial(F.gelu, approximate="tanh"),
        "softmax_scale": architecture.query_pre_attn_scalar**-0.5,
    }


def scale_embeddings(model: GPTModel, architecture: Gemma3Architecture) -> None:
    """Multiply embeddings by the root of their size, rounded to the model's dtype."""
    scale = torch.tensor(architecture.hidden_size**0.5, dtype=model.config.params_dtype).item()
    if model.pre_process:
        model.embedding.register_forward_hook(lambda _, __, embedded: embedded * scale)


def gemma3_tables(
    architecture: Gemma3Architecture, length: int, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, 2 head_dim]: those of global layers, then those of sliding ones."""
    sliding = dataclasses.replace(architecture, rope_theta=architecture.sliding_rope_theta)
    cos, sin = zip(
        *(tables_of(inverse_frequencies(kind), length, dtype=dtype) for kind in (architecture, sliding)),
        strict=True,
    )
    return torch.cat(cos, dim=-1), torch.cat(sin, dim=-1)


def gemma3_flops(architecture: Gemma3Architecture, tree: TokenTree) -> int:
    """Return the FLOPs of a tree's forward pass, without what windows hide."""
    hidden = pairs_before_window(tree, architecture.sliding_window)
    each = 4 * architecture.query_size * len(architecture.sliding_layers)
    return all_pairs_flops(architecture, tree) - each * hidden


LAYERS = FamilyLayers(
    layer=gemma3_layer,
    norm=ZeroCenteredNorm,
    config=gemma3_config,
    finish=scale_embeddings,
    rotary_tables=gemma3_tables,
    forward_flops=gemma3_flops,
)
