"""What the dense decoder families share: rules for their weights, and the fields of their config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from slime_models.family.architecture import MOST_PARTS, Architecture, ConfigReader
from slime_models.family.rules import Rule, Shard, dense_layers, fused_qkv, gated, rename, untied, vocab

_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

EMBEDDING = vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight")
INPUT_NORM = rename(_MEGATRON + "input_layernorm.weight", _HF + "input_layernorm.weight", ("hidden_size",))
QKV_WEIGHT = fused_qkv(
    _MEGATRON + "self_attention.linear_qkv.weight",
    _HF + "self_attn.q_proj.weight",
    _HF + "self_attn.k_proj.weight",
    _HF + "self_attn.v_proj.weight",
)
QKV_BIAS = fused_qkv(
    _MEGATRON + "self_attention.linear_qkv.bias",
    _HF + "self_attn.q_proj.bias",
    _HF + "self_attn.k_proj.bias",
    _HF + "self_attn.v_proj.bias",
    bias=True,
    when=lambda architecture: architecture.qkv_bias,
)
QUERY_NORM = rename(
    _MEGATRON + "self_attention.q_layernorm.weight",
    _HF + "self_attn.q_norm.weight",
    ("head_dim",),
    when=lambda architecture: architecture.qk_layernorm,
)
KEY_NORM = rename(
    _MEGATRON + "self_attention.k_layernorm.weight",
    _HF + "self_attn.k_norm.weight",
    ("head_dim",),
    when=lambda architecture: architecture.qk_layernorm,
)
ATTENTION_OUTPUT = rename(
    _MEGATRON + "self_attention.linear_proj.weight",
    _HF + "self_attn.o_proj.weight",
    ("hidden_size", "query_size"),
    shard=Shard.COLUMNS,
)
MLP_NORM = rename(
    _MEGATRON + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight", ("hidden_size",)
)
GATE_UP = gated(
    _MEGATRON + "mlp.linear_fc1.weight",
    _HF + "mlp.gate_proj.weight",
    _HF + "mlp.up_proj.weight",
    layers=dense_layers,
)
DOWN = rename(
    _MEGATRON + "mlp.linear_fc2.weight",
    _HF + "mlp.down_proj.weight",
    ("hidden_size", "ffn_hidden_size"),
    shard=Shard.COLUMNS,
    layers=dense_layers,
)
FINAL_NORM = rename("decoder.final_layernorm.weight", "model.norm.weight", ("hidden_size",))
OUTPUT = vocab("output_layer.weight", "lm_head.weight", when=untied)

#: Buffers that folders written by transformers before 4.32 hold.
IGNORED = (_HF + "self_attn.rotary_emb.inv_freq",)


def dense_rules(*attention: Rule, mlp: tuple[Rule, ...] = (GATE_UP, DOWN)) -> tuple[Rule, ...]:
    """Return the table of a decoder; `attention` is what it has between fused qkv and output, `mlp` after the norm."""
    return (
        EMBEDDING,
        INPUT_NORM,
        QKV_WEIGHT,
        *attention,
        ATTENTION_OUTPUT,
        MLP_NORM,
        *mlp,
        FINAL_NORM,
        OUTPUT,
    )


def dense_architecture(
    config: Mapping[str, Any],
    *,
    model_type: str,
    head_dim: int | None = None,
    rope_types: Collection[str] = (),
    qkv_bias: bool = False,
    qk_layernorm: bool = False,
    partial_rotary_factor: float = 1.0,
    norm_epsilon: float = 1e-6,
    where: str = "config.json",
) -> Architecture:
    """Read the config.json of a dense decoder.

    Args:
        config: the parsed file.
        model_type: the family's; the file must say the same.
        head_dim: what a file that does not say means; None is hidden_size / num_attention_heads.
        rope_types: kinds of rotary scaling that the family supports, besides none.
        qkv_bias: the family's models have one.
        qk_layernorm: the family's models have one.
        partial_rotary_factor: what a file that does not say means; 1 refuses files that say something else.
        norm_epsilon: what a file that does not say means.
        where: how messages name the file.

    Raises:
        DataError: names the field that is missing, wrong, or asks for what is not implemented.
    """
    read = ConfigReader(config, where)
    _check_kind(read, model_type=model_type, qkv_bias=qkv_bias)
    hidden_size, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    groups = read.integer("num_key_value_heads", heads)
    if heads % groups:
        raise read.error("num_key_value_heads", groups, f"a divisor of num_attention_heads, {heads}")
    if head_dim is None and config.get("head_dim") is None and hidden_size % heads:
        raise read.error(
            "num_attention_heads", heads, f"a divisor of hidden_size, {hidden_size}, or a head_dim"
        )
    rope_theta, rope_scaling = read.rope(rope_types)
    found = Architecture(
        model_type=model_type,
        num_layers=read.integer("num_hidden_layers", most=MOST_PARTS),
        hidden_size=hidden_size,
        ffn_hidden_size=read.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=read.integer("head_dim", head_dim or hidden_size // heads),
        vocab_size=read.integer("vocab_size"),
        norm_epsilon=read.number("rms_norm_eps", norm_epsilon),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        partial_rotary_factor=read.partial_rotary_factor(partial_rotary_factor),
        max_position_embeddings=read.integer("max_position_embeddings"),
        tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        qk_layernorm=qk_layernorm,
    )
    if found.partial_rotary_factor < 1 and (found.rotary_dim < 2 or found.rotary_dim % 2):
        raise read.error(
            "partial_rotary_factor",
            found.partial_rotary_factor,
            f"one that makes an even number of a head's {found.head_dim} dimensions",
        )
    return found


def _check_kind(read: ConfigReader, *, model_type: str, qkv_bias: bool) -> None:
    """Refuse another kind of model, and what of its attention and MLP is not implemented."""
    read.require("model_type", (model_type,), default=None)
    read.require("hidden_act", ("silu",), default="silu")
    for field in ("mlp_bias", "use_sliding_window"):
        read.require(field, (False,), default=False)
    read.require("attention_bias", (qkv_bias,), default=qkv_bias)  # the general flag adds an output bias too
    for index, kind in enumerate(read.get("layer_types") or ()):
        if kind != "full_attention":
            raise read.error(f"layer_types[{index}]", kind, "'full_attention': nothing else is implemented")
