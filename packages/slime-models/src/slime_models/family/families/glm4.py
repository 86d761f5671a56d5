"""GLM-4 of 2025, dense: GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.dense import DOWN, QKV_BIAS, dense_architecture, dense_rules
from slime_models.family.family import ModelFamily
from slime_models.family.rules import Shard, dense_layers, rename

_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

POST_ATTENTION_NORM, POST_MLP_NORM = (
    rename(f"{_MEGATRON}{name}.weight", f"{_HF}{name}.weight", ("hidden_size",))
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
)
#: One matrix in folders, too, gate above up.
FUSED_GATE_UP = rename(
    _MEGATRON + "mlp.linear_fc1.weight",
    _HF + "mlp.gate_up_proj.weight",
    ("gated_size", "hidden_size"),
    shard=Shard.GATED_ROWS,
    layers=dense_layers,
)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a GLM-4 config.json. Where the file does not say, heads are 128 wide and half of each is rotated."""
    dense = dense_architecture(
        config,
        model_type="glm4",
        head_dim=128,
        qkv_bias=ConfigReader(config).flag("attention_bias", default=True),
        partial_rotary_factor=0.5,
        norm_epsilon=1.5625e-7,
    )
    return dataclasses.replace(dense, rotary_interleaved=True, post_layernorms=True)


#: Norms before and after attention and MLP, a bias on queries, keys and values where config.json says so.
GLM4 = ModelFamily(
    model_type="glm4",
    rules=dense_rules(QKV_BIAS, mlp=(POST_ATTENTION_NORM, FUSED_GATE_UP, DOWN, POST_MLP_NORM)),
    architecture=read_architecture,
)
