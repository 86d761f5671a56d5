"""The layers of Gemma 3 in the engine `torch`. Imported when an engine is built."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import cast

import torch.nn.functional as F
from slime_torch.layers.attention import GroupedQueries, GroupedQueryAttention
from slime_torch.layers.builder import Builder
from slime_torch.layers.mlp import GatedMlp
from slime_torch.layers.norm import Norm
from slime_torch.layers.part import Layer
from slime_torch.layers.rope import rope_tables
from slime_torch.model.family_decoder import FamilyDecoder

from slime_example_family.family import Gemma3Architecture


def gemma3_layers(builder: Builder) -> list[Layer]:
    """Return all layers: those that see everything are of one kind, those with a window and rotary tables of their own of another."""
    a = cast(Gemma3Architecture, builder.architecture)
    scale = a.query_pre_attn_scalar**-0.5
    sliding = dataclasses.replace(a, rope_theta=a.sliding_rope_theta)
    tables = rope_tables(sliding, builder.max_length)
    kinds = {
        False: GroupedQueries(builder, scale=scale),
        True: GroupedQueries(builder, scale=scale, window=a.sliding_window, tables=tables),
    }
    return [
        gemma3_layer(builder, number, kinds[number in a.sliding_layers]) for number in range(a.num_layers)
    ]


def gemma3_layer(builder: Builder, number: int, kind: GroupedQueries) -> Layer:
    """Return a layer, numbered from 0: four norms, which multiply by 1 + weight, and an MLP with another activation."""
    prefix = builder.layer_prefix(number)

    def norm(name: str) -> Norm:
        return builder.norm(f"{prefix}{name}.weight", offset=1.0)

    return Layer(
        input_norm=norm("input_layernorm"),
        attention=GroupedQueryAttention(builder, f"{prefix}self_attn.", kind, norm_offset=1.0),
        post_attention_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp=GatedMlp(builder, f"{prefix}mlp.", activation=partial(F.gelu, approximate="tanh")),
        post_mlp_norm=norm("post_feedforward_layernorm"),
    )


DECODER = FamilyDecoder(
    layers=gemma3_layers,
    norm=partial(Builder.norm, offset=1.0),
    embedding_scale=lambda architecture: architecture.hidden_size**0.5,
)
