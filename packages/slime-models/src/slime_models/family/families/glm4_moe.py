"""GLM-4.5, GLM-4.5-Air and GLM-4.6: dense layers first, then experts beside a shared one, chosen with a bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import MOST_PARTS, Architecture, ConfigReader
from slime_models.family.families.dense import (
    DOWN,
    GATE_UP,
    KEY_NORM,
    QKV_BIAS,
    QUERY_NORM,
    dense_architecture,
    dense_rules,
)
from slime_models.family.families.qwen3_moe import EXPERT_DOWN, EXPERT_GATE_UP, ROUTER
from slime_models.family.family import EMBEDDING_WEIGHT, OUTPUT_WEIGHT, ModelFamily
from slime_models.family.rules import Shard, gated, moe_layers, mtp_rules, rename

_MEGATRON, _HF = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."

EXPERT_BIAS = rename(
    _MEGATRON + "router.expert_bias",
    _HF + "gate.e_score_correction_bias",
    ("num_moe_experts",),
    layers=moe_layers,
    buffer=True,
)
SHARED_GATE_UP = gated(
    _MEGATRON + "shared_experts.linear_fc1.weight",
    _HF + "shared_experts.gate_proj.weight",
    _HF + "shared_experts.up_proj.weight",
    width="moe_shared_expert_intermediate_size",
    fused="shared_gated_size",
    layers=moe_layers,
)
SHARED_DOWN = rename(
    _MEGATRON + "shared_experts.linear_fc2.weight",
    _HF + "shared_experts.down_proj.weight",
    ("hidden_size", "moe_shared_expert_intermediate_size"),
    shard=Shard.COLUMNS,
    layers=moe_layers,
)

#: What a file that does not say means.
DEFAULTS: Mapping[str, int] = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a GLM-4 MoE config.json. Half of each head is rotated where the file does not say."""
    read = ConfigReader(config)
    dense = dense_architecture(
        config,
        model_type="glm4_moe",
        qkv_bias=read.flag("attention_bias", default=False),
        qk_layernorm=read.flag("use_qk_norm", default=False),
        partial_rotary_factor=0.5,
        norm_epsilon=1e-5,
    )
    return with_shared_experts(dense, read, dense_layers=first_layers(read, dense.num_layers, default=1))


def with_shared_experts(
    dense: Architecture,
    read: ConfigReader,
    *,
    dense_layers: tuple[int, ...],
    defaults: Mapping[str, int] = DEFAULTS,
    scaling: float = 1.0,
) -> Architecture:
    """Return a dense architecture with experts beside shared ones, chosen by sigmoid scores and a bias.

    Args:
        dense: all else.
        read: the file.
        dense_layers: those that have none.
        defaults: what a file that does not say means, by field.
        scaling: what multiplies the gates where the file does not say.

    Raises:
        DataError: names the field that is wrong, or asks for what is not implemented.
    """
    experts = read.integer("n_routed_experts", defaults["n_routed_experts"], most=MOST_PARTS)
    top_k = read.integer("num_experts_per_tok", defaults["num_experts_per_tok"])
    if top_k > experts:
        raise read.error("num_experts_per_tok", top_k, f"at most n_routed_experts, {experts}")
    if top_k == 1:
        raise read.error(
            "num_experts_per_tok", top_k, "2 or more: Megatron gives a lone expert its score as gate"
        )
    read.require("norm_topk_prob", (True,), default=True)
    groups, group_top_k = _groups(read, experts, top_k, defaults)
    width = read.integer("moe_intermediate_size", defaults["moe_intermediate_size"])
    return dataclasses.replace(
        dense,
        num_moe_experts=experts,
        dense_layers=dense_layers,
        moe_ffn_hidden_size=width,
        moe_router_topk=top_k,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=groups,
        moe_router_group_topk=group_top_k,
        moe_router_topk_scaling_factor=read.number("routed_scaling_factor", scaling),
        moe_shared_expert_intermediate_size=width * read.integer("n_shared_experts", 1),
        mtp_num_layers=_count(read, "num_nextn_predict_layers", 1),
    )


def _groups(
    read: ConfigReader, experts: int, top_k: int, defaults: Mapping[str, int]
) -> tuple[int | None, int | None]:
    """Return (groups of experts, of which so many are chosen first); neither where there is one group."""
    groups = read.integer("n_group", defaults["n_group"])
    chosen = read.integer("topk_group", defaults["topk_group"])
    if groups == 1:
        return None, None
    if experts % groups:
        raise read.error("n_group", groups, f"a divisor of n_routed_experts, {experts}")
    if chosen > groups or top_k != 2 * chosen:
        raise read.error(
            "topk_group",
            chosen,
            f"half of num_experts_per_tok, {top_k}, and at most n_group, {groups}: transformers rates a group by its best "
            "two experts, Megatron by its best num_experts_per_tok / topk_group",
        )
    return groups, chosen


def first_layers(read: ConfigReader, num_layers: int, *, default: int) -> tuple[int, ...]:
    """Return the layers that `first_k_dense_replace` says are dense: the first ones, and not all."""
    n = _count(read, "first_k_dense_replace", default)
    if n >= num_layers:
        raise read.error(
            "first_k_dense_replace", n, f"less than num_hidden_layers, {num_layers}: a layer with experts"
        )
    return tuple(range(n))


def _count(read: ConfigReader, field: str, default: int) -> int:
    """Return a count that may be 0."""
    return 0 if read.get(field) == 0 else read.integer(field, default)


_DECODER = dense_rules(
    QKV_BIAS,
    QUERY_NORM,
    KEY_NORM,
    mlp=(GATE_UP, DOWN, ROUTER, EXPERT_BIAS, SHARED_GATE_UP, SHARED_DOWN, EXPERT_GATE_UP, EXPERT_DOWN),
)

#: Dense layers as Qwen 3's, bias and norms of queries and keys where config.json says so; then layers with experts.
GLM4_MOE = ModelFamily(
    model_type="glm4_moe",
    rules=(*_DECODER, *mtp_rules(_DECODER)),
    architecture=read_architecture,
    mtp_prefix="model.layers.{layer}.",
    copies={"embed_tokens.weight": EMBEDDING_WEIGHT, "shared_head.head.weight": OUTPUT_WEIGHT},
)
