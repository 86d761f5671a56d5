"""Qwen 3, dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture
from slime_models.family.families.dense import KEY_NORM, QUERY_NORM, dense_architecture, dense_rules
from slime_models.family.family import ModelFamily


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Qwen 3 config.json. Heads are 128 wide where the file does not say."""
    return dense_architecture(
        config, model_type="qwen3", head_dim=128, qk_layernorm=True, rope_types=("yarn",)
    )


#: As Llama, with an RMSNorm over each head of queries and keys.
QWEN3 = ModelFamily(
    model_type="qwen3", rules=dense_rules(QUERY_NORM, KEY_NORM), architecture=read_architecture
)
