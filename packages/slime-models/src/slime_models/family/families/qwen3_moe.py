"""Qwen 3 with experts, in every layer or in some."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import MOST_PARTS, Architecture, ConfigReader
from slime_models.family.families.dense import (
    DOWN,
    GATE_UP,
    KEY_NORM,
    QUERY_NORM,
    dense_architecture,
    dense_rules,
)
from slime_models.family.family import ModelFamily
from slime_models.family.rules import Shard, gated, moe_layers, rename

_MEGATRON = "decoder.layers.{layer}.mlp."
_HF = "model.layers.{layer}.mlp."
_EXPERT, _HF_EXPERT = _MEGATRON + "experts.local_experts.{expert}.", _HF + "experts.{expert}."

ROUTER = rename(
    _MEGATRON + "router.weight", _HF + "gate.weight", ("num_moe_experts", "hidden_size"), layers=moe_layers
)
EXPERT_GATE_UP = gated(
    _EXPERT + "linear_fc1.weight",
    _HF_EXPERT + "gate_proj.weight",
    _HF_EXPERT + "up_proj.weight",
    width="moe_ffn_hidden_size",
    fused="moe_gated_size",
    layers=moe_layers,
)
EXPERT_DOWN = rename(
    _EXPERT + "linear_fc2.weight",
    _HF_EXPERT + "down_proj.weight",
    ("hidden_size", "moe_ffn_hidden_size"),
    shard=Shard.COLUMNS,
    layers=moe_layers,
)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Qwen 3 MoE config.json."""
    dense = dense_architecture(config, model_type="qwen3_moe", qk_layernorm=True, rope_types=("yarn",))
    return with_experts(dense, ConfigReader(config), top_k=8, width=768)


def with_experts[A: Architecture](dense: A, read: ConfigReader, *, top_k: int, width: int) -> A:
    """Return a dense architecture with experts, in the layers in which Qwen's config.json has them.

    Args:
        dense: all else.
        read: the file.
        top_k: experts of a token where the file does not say.
        width: that of an expert where the file does not say.
    """
    every, others = read.integer("decoder_sparse_step", 1), read.get("mlp_only_layers") or []
    if not isinstance(others, list) or not all(type(one) is int for one in others):
        raise read.error("mlp_only_layers", others, "a list of layers, numbered from 0")
    layers = range(dense.num_layers)
    without = tuple(layer for layer in layers if layer in others or (layer + 1) % every)
    if len(without) == dense.num_layers:
        raise read.error(
            "mlp_only_layers" if every == 1 else "decoder_sparse_step",
            others if every == 1 else every,
            f"one that leaves a layer of {dense.num_layers} with experts",
        )
    field = (
        "num_experts" if read.get("num_local_experts") is None else "num_local_experts"
    )  # transformers 5's
    experts, top_k = read.integer(field, most=MOST_PARTS), read.integer("num_experts_per_tok", top_k)
    if top_k > experts:
        raise read.error("num_experts_per_tok", top_k, f"at most {field}, {experts}")
    return dataclasses.replace(
        dense,
        num_moe_experts=experts,
        dense_layers=without,
        moe_ffn_hidden_size=read.integer("moe_intermediate_size", width),
        moe_router_topk=top_k,
        moe_norm_topk_prob=read.flag("norm_topk_prob", default=False),
    )


#: As Qwen 3, with a router and experts in the place of the MLP of most layers; experts are separate tensors, as in folders.
QWEN3_MOE = ModelFamily(
    model_type="qwen3_moe",
    rules=dense_rules(QUERY_NORM, KEY_NORM, mlp=(GATE_UP, DOWN, ROUTER, EXPERT_GATE_UP, EXPERT_DOWN)),
    architecture=read_architecture,
)
