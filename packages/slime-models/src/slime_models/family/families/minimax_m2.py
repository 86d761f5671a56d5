"""MiniMax-M2: experts in every layer, and norms over all heads of queries, and of keys, together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import MOST_PARTS, Architecture, ConfigReader
from slime_models.family.families.dense import dense_architecture, dense_rules
from slime_models.family.family import ModelFamily
from slime_models.family.rules import Shard, gated, moe_layers, rename

_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_MLP, _HF_MLP = f"{_MEGATRON}mlp.", f"{_HF}block_sparse_moe."
_EXPERT, _HF_EXPERT = f"{_MLP}experts.local_experts.{{expert}}.", f"{_HF_MLP}experts.{{expert}}."

QUERY_NORM, KEY_NORM = (
    rename(
        f"{_MEGATRON}self_attention.{letter}_layernorm.weight",
        f"{_HF}self_attn.{letter}_norm.weight",
        (size,),
    )
    for letter, size in (("q", "query_size"), ("k", "key_value_size"))
)
ROUTER = rename(
    f"{_MLP}router.weight", f"{_HF_MLP}gate.weight", ("num_moe_experts", "hidden_size"), layers=moe_layers
)
EXPERT_BIAS = rename(
    f"{_MLP}router.expert_bias",
    f"{_HF_MLP}e_score_correction_bias",
    ("num_moe_experts",),
    layers=moe_layers,
    buffer=True,
)
EXPERT_GATE_UP = gated(
    f"{_EXPERT}linear_fc1.weight",
    f"{_HF_EXPERT}w1.weight",
    f"{_HF_EXPERT}w3.weight",
    width="moe_ffn_hidden_size",
    fused="moe_gated_size",
    layers=moe_layers,
)
EXPERT_DOWN = rename(
    f"{_EXPERT}linear_fc2.weight",
    f"{_HF_EXPERT}w2.weight",
    ("hidden_size", "moe_ffn_hidden_size"),
    shard=Shard.COLUMNS,
    layers=moe_layers,
)
#: Fields of published files that say nothing that transformers and the layers here do not do, and their only value.
_FIXED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "router_jitter_noise": 0.0,
    "shared_intermediate_size": 0,
}


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a MiniMax-M2 config.json. Published files say by `rotary_dim` how much of each head is rotated.

    The multi-token prediction layers that they mention are not in their folders, and no part of the model.
    """
    read = ConfigReader(config)
    for field, value in _FIXED.items():
        read.require(field, (value,), default=value)
    if any(kind != 1 for kind in read.get("attn_type_list") or ()):
        raise read.error("attn_type_list", read.get("attn_type_list"), "1 alone: each layer sees all tokens")
    head_dim = read.integer("head_dim", 128)
    rotated = read.integer("rotary_dim", head_dim) / head_dim
    dense = dense_architecture(
        {"rope_theta": 5e6, "partial_rotary_factor": rotated} | dict(config),
        model_type="minimax_m2",
        head_dim=128,
        qk_layernorm=True,
        partial_rotary_factor=0.5,
    )
    experts, top_k = (
        read.integer("num_local_experts", 256, most=MOST_PARTS),
        read.integer("num_experts_per_tok", 8),
    )
    if not 1 < top_k <= experts:
        raise read.error(
            "num_experts_per_tok",
            top_k,
            f"2 to num_local_experts, {experts}: Megatron gives a lone expert its score as gate",
        )
    return dataclasses.replace(
        dense,
        num_moe_experts=experts,
        moe_ffn_hidden_size=dense.ffn_hidden_size,
        moe_router_topk=top_k,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )


MINIMAX_M2 = ModelFamily(
    model_type="minimax_m2",
    rules=dense_rules(QUERY_NORM, KEY_NORM, mlp=(ROUTER, EXPERT_BIAS, EXPERT_GATE_UP, EXPERT_DOWN)),
    architecture=read_architecture,
    layers="slime_megatron.families.minimax_m2:LAYERS",
    decoder="slime_torch.families.minimax_m2:DECODER",
    not_updated={
        "sglang": "slime-sglang finds experts in SGLang's memory as gate_proj, up_proj and down_proj alone, which are w1, w3 and w2 here: "
        "no update could be proven"
    },
)
