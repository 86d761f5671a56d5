"""Qwen 1.5 and 2 with experts beside a shared one behind a gate, in every layer or in some."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.dense import DOWN, GATE_UP, QKV_BIAS, dense_architecture, dense_rules
from slime_models.family.families.qwen3_moe import EXPERT_DOWN, EXPERT_GATE_UP, ROUTER, with_experts
from slime_models.family.family import ModelFamily
from slime_models.family.rules import Shard, gated, moe_layers, rename

_MEGATRON, _HF = "decoder.layers.{layer}.mlp.shared_experts.", "model.layers.{layer}.mlp."

SHARED_GATE_UP = gated(
    _MEGATRON + "linear_fc1.weight",
    _HF + "shared_expert.gate_proj.weight",
    _HF + "shared_expert.up_proj.weight",
    width="moe_shared_expert_intermediate_size",
    fused="shared_gated_size",
    layers=moe_layers,
)
SHARED_DOWN = rename(
    _MEGATRON + "linear_fc2.weight",
    _HF + "shared_expert.down_proj.weight",
    ("hidden_size", "moe_shared_expert_intermediate_size"),
    shard=Shard.COLUMNS,
    layers=moe_layers,
)
SHARED_GATE = rename(
    _MEGATRON + "gate_weight", _HF + "shared_expert_gate.weight", ("one", "hidden_size"), layers=moe_layers
)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Qwen 2 MoE config.json."""
    read = ConfigReader(config)
    read.require("qkv_bias", (True,), default=True)
    dense = dense_architecture(config, model_type="qwen2_moe", qkv_bias=True, rope_types=("yarn",))
    return dataclasses.replace(
        with_experts(dense, read, top_k=4, width=1408),
        moe_shared_expert_intermediate_size=read.integer("shared_expert_intermediate_size", 5632),
        moe_shared_expert_gate=True,
    )


#: As Qwen 2, with Qwen 3's experts beside a shared one.
QWEN2_MOE = ModelFamily(
    model_type="qwen2_moe",
    rules=dense_rules(
        QKV_BIAS,
        mlp=(GATE_UP, DOWN, ROUTER, SHARED_GATE, SHARED_GATE_UP, SHARED_DOWN, EXPERT_GATE_UP, EXPERT_DOWN),
    ),
    architecture=read_architecture,
    not_served_on_cpu={
        "sglang": "SGLang 0.5.23 computes the shared expert's gate by a kernel for GPUs alone, where nobody has tried it"
    },
)
