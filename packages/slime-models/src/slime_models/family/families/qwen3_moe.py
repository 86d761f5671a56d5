"""Qwen 3 with experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.dense import KEY_NORM, QUERY_NORM, dense_architecture, dense_rules
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
    """Read a Qwen 3 MoE config.json. Layers without experts are not implemented."""
    dense = dense_architecture(config, model_type="qwen3_moe", qk_layernorm=True)
    read = ConfigReader(config)
    read.require("decoder_sparse_step", (1,), default=1)
    read.require("mlp_only_layers", ([],), default=[])
    field = (
        "num_experts" if read.get("num_local_experts") is None else "num_local_experts"
    )  # transformers 5's
    experts, top_k = read.integer(field), read.integer("num_experts_per_tok", 8)
    if top_k > experts:
        raise read.error("num_experts_per_tok", top_k, f"at most {field}, {experts}")
    return dataclasses.replace(
        dense,
        num_moe_experts=experts,
        moe_ffn_hidden_size=read.integer("moe_intermediate_size", 768),
        moe_router_topk=top_k,
        moe_norm_topk_prob=read.flag("norm_topk_prob", default=False),
    )


#: As Qwen 3, with a router and experts in the place of the MLP; experts are separate tensors, as in folders.
QWEN3_MOE = ModelFamily(
    model_type="qwen3_moe",
    rules=dense_rules(QUERY_NORM, KEY_NORM, mlp=(ROUTER, EXPERT_GATE_UP, EXPERT_DOWN)),
    architecture=read_architecture,
)
