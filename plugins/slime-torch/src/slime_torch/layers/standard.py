"""The layers that `Architecture` says all of."""

from __future__ import annotations

from slime_torch.layers.attention import GroupedQueries, GroupedQueryAttention
from slime_torch.layers.builder import Builder
from slime_torch.layers.experts import Experts
from slime_torch.layers.mlp import GatedMlp
from slime_torch.layers.part import Attention, Layer, Mlp


def standard_layers(builder: Builder) -> list[Layer]:
    """Return all layers of a decoder, with the names of llama's tensors, and glm4's of norms after attention and MLP."""
    kind = GroupedQueries(builder)
    return [
        standard_layer(
            builder, number, GroupedQueryAttention(builder, f"{builder.layer_prefix(number)}self_attn.", kind)
        )
        for number in range(builder.architecture.num_layers)
    ]


def standard_layer(builder: Builder, number: int, attention: Attention, mlp: Mlp | None = None) -> Layer:
    """Return a layer, numbered from 0, of such attention and the MLP that the architecture says, or another."""
    prefix, has_more = builder.layer_prefix(number), builder.architecture.post_layernorms
    return Layer(
        input_norm=builder.norm(prefix + "input_layernorm.weight"),
        attention=attention,
        mlp_norm=builder.norm(prefix + "post_attention_layernorm.weight"),
        mlp=mlp or standard_mlp(builder, number),
        post_attention_norm=builder.norm(prefix + "post_self_attn_layernorm.weight") if has_more else None,
        post_mlp_norm=builder.norm(prefix + "post_mlp_layernorm.weight") if has_more else None,
    )


def standard_mlp(builder: Builder, number: int) -> Mlp:
    """Return the MLP of a layer, numbered from 0: experts where the architecture has some there."""
    if number in builder.architecture.moe_layers:
        return Experts(builder, f"{builder.layer_prefix(number)}mlp.")
    return GatedMlp(builder, f"{builder.layer_prefix(number)}mlp.")
