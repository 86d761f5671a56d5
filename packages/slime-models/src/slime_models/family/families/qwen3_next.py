"""Qwen 3 Next: three delta nets for each layer with gated attention, experts beside a shared one behind a gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.delta_net import (
    DECODER,
    GROUPED_PROJECTION,
    LAYERS,
    MEMORY,
    NOT_PARALLEL,
    NOT_SERVED,
    delta_net_architecture,
    delta_net_rules,
)
from slime_models.family.families.dense import DOWN, GATE_UP
from slime_models.family.families.qwen2_moe import SHARED_DOWN, SHARED_GATE, SHARED_GATE_UP
from slime_models.family.families.qwen3_moe import EXPERT_DOWN, EXPERT_GATE_UP, ROUTER, with_experts
from slime_models.family.family import ModelFamily

EXPERTS = (ROUTER, SHARED_GATE, SHARED_GATE_UP, SHARED_DOWN, EXPERT_GATE_UP, EXPERT_DOWN)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Qwen 3 Next config.json."""
    read = ConfigReader(config)
    without = delta_net_architecture(config, model_type="qwen3_next")
    return dataclasses.replace(
        with_experts(without, read, top_k=10, width=512),
        moe_norm_topk_prob=read.flag("norm_topk_prob", default=True),
        moe_shared_expert_intermediate_size=read.integer("shared_expert_intermediate_size", 512),
        moe_shared_expert_gate=True,
    )


#: Multi-token prediction layers, which transformers has no class for, are copied as they are.
QWEN3_NEXT = ModelFamily(
    model_type="qwen3_next",
    rules=delta_net_rules(GROUPED_PROJECTION, (GATE_UP, DOWN, *EXPERTS)),
    architecture=read_architecture,
    carried=("mtp.",),
    layers=LAYERS,
    memory=MEMORY,
    decoder=DECODER,
    not_served_on_cpu=NOT_SERVED,
    not_parallel=NOT_PARALLEL,
)
