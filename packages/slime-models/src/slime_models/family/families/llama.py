"""Llama, and every model that calls itself `llama`: SmolLM2, TinyLlama, Llama 3.2, ..."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture
from slime_models.family.families.dense import IGNORED, dense_architecture, dense_rules
from slime_models.family.family import ModelFamily


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Llama config.json. Rotary scaling may be `llama3` or `yarn`."""
    return dense_architecture(config, model_type="llama", rope_types=("llama3", "yarn"))


#: Neither biases nor norms of queries and keys.
LLAMA = ModelFamily(model_type="llama", rules=dense_rules(), architecture=read_architecture, ignored=IGNORED)
