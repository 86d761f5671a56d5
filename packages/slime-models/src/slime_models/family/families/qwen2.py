"""Qwen 2 and 2.5, dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture
from slime_models.family.families.dense import IGNORED, QKV_BIAS, dense_architecture, dense_rules
from slime_models.family.family import ModelFamily


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Qwen 2 config.json. Queries, keys and values have a bias, which the file does not mention."""
    return dense_architecture(config, model_type="qwen2", qkv_bias=True, rope_types=("yarn",))


#: As Llama, with a bias on queries, keys and values.
QWEN2 = ModelFamily(
    model_type="qwen2", rules=dense_rules(QKV_BIAS), architecture=read_architecture, ignored=IGNORED
)
