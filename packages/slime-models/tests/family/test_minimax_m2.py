"""MiniMax-M2's config.json, and its names."""

from __future__ import annotations

import math

import pytest
from slime_core.errors import DataError
from slime_models.family.families.minimax_m2 import MINIMAX_M2

#: Of MiniMaxAI/MiniMax-M2, without its fields of fp8 weights and of multi-token prediction.
M2 = {
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_the_published_file_is_read():
    read = MINIMAX_M2.architecture(M2)
    assert (read.query_size, read.key_value_size, read.rotary_dim, read.rope_theta) == (6144, 1024, 64, 5e6)
    assert (read.num_moe_experts, read.moe_router_topk, read.moe_ffn_hidden_size) == (256, 8, 1536)
    assert (read.moe_router_score_function, read.moe_router_enable_expert_bias) == ("sigmoid", True)
    shapes = MINIMAX_M2.hf_shapes(read)
    assert shapes["model.layers.61.self_attn.k_norm.weight"] == (1024,)
    assert shapes["model.layers.0.block_sparse_moe.experts.255.w2.weight"] == (3072, 1536)
    assert round(sum(map(math.prod, shapes.values())) / 1e9) == 229  # the 230B of its model card
    newer = {name: value for name, value in M2.items() if name not in ("rotary_dim", "rope_theta")}
    table = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    assert MINIMAX_M2.architecture(newer | {"rope_parameters": table}) == read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: found 'softmax'; wanted 'sigmoid'"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type: found 'per_head'; wanted 'per_layer'"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size: found 64; wanted 0"),
        ({"attn_type_list": [0, 1]}, r"attn_type_list: found \[0, 1\]; wanted 1 alone"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok: found 1; wanted 2 to num_local_experts, 256"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_field(changes, message):
    with pytest.raises(DataError, match=message):
        MINIMAX_M2.architecture(M2 | changes)
