"""GLM-4 of 2024, dense, as transformers has it: GLM-4-9B, GLM-4-9B-Chat, GLM-Edge."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.dense import DOWN, QKV_BIAS, dense_architecture, dense_rules
from slime_models.family.families.glm4 import FUSED_GATE_UP
from slime_models.family.family import ModelFamily


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a GLM config.json. Where the file does not say, heads are 128 wide and half of each is rotated."""
    dense = dense_architecture(
        config,
        model_type="glm",
        head_dim=128,
        qkv_bias=ConfigReader(config).flag("attention_bias", default=True),
        partial_rotary_factor=0.5,
        norm_epsilon=1.5625e-7,
    )
    return dataclasses.replace(dense, rotary_interleaved=True)


#: As Llama, with a bias on queries, keys and values where config.json says so; neighbours are rotated.
GLM = ModelFamily(
    model_type="glm",
    rules=dense_rules(QKV_BIAS, mlp=(FUSED_GATE_UP, DOWN)),
    architecture=read_architecture,
    not_served={
        "sglang": "SGLang 0.5.23 has no class of its own for it, and with that of transformers 5.19 it does not start: it knows no matrices whose "
        "rows are gathered again (`colwise_gather_output`)"
    },
)
