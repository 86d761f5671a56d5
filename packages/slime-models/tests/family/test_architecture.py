from __future__ import annotations

import math
import re
from typing import Any

import pytest
from slime_core.errors import DataError
from slime_models.family.architecture import ConfigReader, RopeScaling
from slime_models.family.families.glm4 import GLM4
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.qwen2 import QWEN2
from slime_models.family.families.qwen2_moe import QWEN2_MOE
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.family.family import ModelFamily

from ..conftest import tiny_config

LLAMA_3_2_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "vocab_size": 151936,
}
SCALING = RopeScaling(
    rope_type="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def test_llama_is_read_from_the_fields_of_older_files() -> None:
    read = LLAMA.architecture(LLAMA_3_2_1B)
    assert (read.num_layers, read.hidden_size, read.ffn_hidden_size, read.vocab_size) == (
        16,
        2048,
        8192,
        128256,
    )
    assert (read.num_attention_heads, read.num_query_groups, read.head_dim, read.qkv_size) == (
        32,
        8,
        64,
        3072,
    )
    assert (read.norm_epsilon, read.rope_theta, read.rope_scaling) == (1e-5, 500000.0, SCALING)
    assert (read.tie_word_embeddings, read.qkv_bias, read.qk_layernorm) == (True, False, False)


def test_rotary_fields_of_newer_files_mean_the_same() -> None:
    old = dict(LLAMA_3_2_1B)
    parameters = {"rope_theta": old.pop("rope_theta"), **old.pop("rope_scaling")}  # type: ignore[dict-item]  # a table
    assert LLAMA.architecture({**old, "rope_parameters": parameters}) == LLAMA.architecture(LLAMA_3_2_1B)


def test_qwen2_has_a_qkv_bias_and_derives_its_head_width() -> None:
    read = QWEN2.architecture({"model_type": "qwen2", **QWEN})
    assert (read.head_dim, read.qkv_bias, read.qk_layernorm, read.tie_word_embeddings) == (
        64,
        True,
        False,
        False,
    )


def test_qwen3_has_head_norms_and_wide_heads() -> None:
    read = QWEN3.architecture({"model_type": "qwen3", **QWEN})
    assert (read.head_dim, read.query_size, read.qkv_bias, read.qk_layernorm) == (128, 14 * 128, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size: found None"),
        ({"num_hidden_layers": "24"}, "num_hidden_layers: found '24'"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads: found 3; wanted a divisor of num_attention_heads, 14",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'; wanted 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window: found True"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types[1]: found 'sliding_attention'",
        ),
        ({"attention_bias": True}, "attention_bias: found True"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: found 'yes'; wanted true or false"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: found 0"),
        ({"model_type": "llama"}, "model_type: found 'llama'; wanted 'qwen3'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_scaling: rope_type: found 'linear'; wanted 'default' or 'yarn'",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: found 0.5"),
    ],
)
def test_what_is_not_supported_is_refused_by_the_name_of_its_field(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        QWEN3.architecture({"model_type": "qwen3", **QWEN, **changes})


def test_every_family_here_refuses_a_model_type_that_is_not_its_own(family: ModelFamily) -> None:
    """So `--model-name` is for families of other packages."""
    config = tiny_config(family.model_type)
    assert family.architecture(config).model_type == family.model_type
    other = "qwen3" if family.model_type != "qwen3" else "qwen2"
    with pytest.raises(DataError, match=f"model_type: found '{other}'; wanted '{family.model_type}'"):
        family.architecture(config | {"model_type": other})


QWEN_MOE = {"model_type": "qwen3_moe", **QWEN, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def test_qwen3_moe_counts_experts_under_either_name() -> None:
    """Folders on the hub say num_experts, those that transformers 5 writes num_local_experts."""
    for field in ("num_experts", "num_local_experts"):
        read = QWEN3_MOE.architecture({**QWEN_MOE, field: 128, "norm_topk_prob": True})
        assert (read.num_moe_experts, read.moe_router_topk, read.moe_ffn_hidden_size) == (128, 8, 768)
        assert (read.moe_gated_size, read.moe_norm_topk_prob, read.head_dim) == (1536, True, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "num_experts: found None; wanted a whole number of at least 1"),
        ({"num_experts": 4}, "num_experts_per_tok: found 8; wanted at most num_experts, 4"),
        ({"num_experts": 8, "mlp_only_layers": "0"}, "mlp_only_layers: found '0'; wanted a list of layers"),
        (
            {"num_experts": 8, "decoder_sparse_step": 99},
            "decoder_sparse_step: found 99; wanted one that leaves",
        ),
    ],
)
def test_experts_that_are_not_supported_are_refused_by_the_name_of_their_field(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        QWEN3_MOE.architecture({**QWEN_MOE, **changes})


#: Of zai-org/GLM-4.5-Air.
GLM_AIR = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "use_qk_norm": False,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}


def test_glm_has_dense_layers_first_then_experts_beside_a_shared_one() -> None:
    read = GLM4_MOE.architecture(GLM_AIR)
    assert (read.dense_layers, read.moe_layers[:2], len(read.moe_layers)) == ((0,), (1, 2), 45)
    assert (read.num_moe_experts, read.moe_router_topk, read.moe_ffn_hidden_size) == (128, 8, 1408)
    assert (read.moe_shared_expert_intermediate_size, read.shared_gated_size) == (1408, 2816)
    assert (read.moe_router_num_groups, read.moe_router_group_topk, read.mtp_num_layers) == (None, None, 1)
    assert (read.qkv_bias, read.qk_layernorm, read.rotary_dim, read.rope_theta) == (True, False, 64, 1e6)


def test_share_of_a_head_that_is_rotated_is_read_from_files_of_either_age() -> None:
    """transformers 5 writes it into rope_parameters, which comes first; half is what a file means that does not say."""
    plain = {name: value for name, value in GLM_AIR.items() if name != "partial_rotary_factor"}
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
    assert GLM4_MOE.architecture(plain).rotary_dim == 64
    assert GLM4_MOE.architecture({**plain, "partial_rotary_factor": 0.75}).rotary_dim == 96
    assert GLM4_MOE.architecture({**GLM_AIR, **newer}).rotary_dim == 32
    assert GLM4_MOE.architecture({**plain, "rope_parameters": {"rope_theta": 1e6}}).rotary_dim == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob: found False; wanted True"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok: found 1; wanted 2 or more"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok: found 200; wanted at most n_routed_experts, 128"),
        ({"first_k_dense_replace": 46}, "first_k_dense_replace: found 46; wanted less than num_hidden_layers, 46"),
        ({"n_group": 3}, "n_group: found 3; wanted a divisor of n_routed_experts, 128"),
        ({"n_group": 8, "topk_group": 2}, "topk_group: found 2; wanted half of num_experts_per_tok, 8"),
        ({"partial_rotary_factor": 0.51}, "partial_rotary_factor: found 0.51; wanted one that makes an even number"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: found 1.5; wanted a number above 0 and at most 1"),
        ({"attention_bias": "yes"}, "attention_bias: found 'yes'; wanted true or false"),
        (
            {"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling: found {'rope_type': 'yarn'}; wanted what rope_parameters says, or only one of them",
        ),
    ],
)  # fmt: skip
def test_glm_that_is_not_supported_is_refused_by_the_name_of_its_field(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        GLM4_MOE.architecture({**GLM_AIR, **changes})


#: Of zai-org/GLM-4-9B-0414, as the reference system's script repeats it.
GLM4_9B = {
    "model_type": "glm4",
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}


def test_glm4_rotates_half_of_each_head_in_pairs_of_neighbours_and_has_norms_on_both_sides() -> None:
    read = GLM4.architecture(GLM4_9B)
    assert (read.num_layers, read.hidden_size, read.ffn_hidden_size, read.vocab_size) == (
        40,
        4096,
        13696,
        151552,
    )
    assert (read.num_attention_heads, read.num_query_groups, read.head_dim) == (32, 2, 128)
    assert (read.rotary_dim, read.rotary_interleaved, read.rope_theta) == (64, True, 10_000.0)
    assert (read.qkv_bias, read.post_layernorms, read.qk_layernorm, read.norm_epsilon) == (
        True,
        True,
        False,
        1e-5,
    )
    without = {
        name: value
        for name, value in GLM4_9B.items()
        if name not in ("partial_rotary_factor", "attention_bias")
    }
    assert GLM4.architecture(without) == read
    assert not GLM4.architecture(GLM4_9B | {"attention_bias": False}).qkv_bias
    shapes = GLM4.hf_shapes(read)
    assert shapes["model.layers.39.mlp.gate_up_proj.weight"] == (27392, 4096)
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (256,)
    assert len(shapes) == 3 + 40 * 13


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"partial_rotary_factor": 0.51},
            "partial_rotary_factor: found 0.51; wanted one that makes an even number",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'; wanted 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: found 'yarn'; wanted 'default'"),
    ],
)
def test_glm4_that_is_not_supported_is_refused_by_the_name_of_its_field(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        GLM4.architecture({**GLM4_9B, **changes})


#: Of Qwen/Qwen1.5-MoE-A2.7B.
QWEN_A27B = {
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_qwen2_has_experts_beside_a_shared_one_behind_a_gate() -> None:
    read = QWEN2_MOE.architecture(QWEN_A27B)
    assert (read.num_moe_experts, read.moe_router_topk, read.moe_ffn_hidden_size) == (60, 4, 1408)
    assert (read.moe_shared_expert_intermediate_size, read.moe_shared_expert_gate) == (5632, True)
    assert (read.qkv_bias, read.qk_layernorm, read.moe_norm_topk_prob) == (True, False, False)
    shapes = QWEN2_MOE.hf_shapes(read)
    assert shapes["model.layers.23.mlp.shared_expert_gate.weight"] == (1, 2048)
    assert shapes["model.layers.0.mlp.shared_expert.down_proj.weight"] == (2048, 5632)
    some = QWEN2_MOE.architecture(QWEN_A27B | {"mlp_only_layers": [0, 5], "decoder_sparse_step": 2})
    assert some.moe_layers == (1, 3, *range(7, 24, 2))
    shapes = QWEN2_MOE.hf_shapes(some)
    assert shapes["model.layers.5.mlp.gate_proj.weight"] == (5632, 2048)
    assert "model.layers.5.mlp.gate.weight" not in shapes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_a_number_is_finite(value):
    with pytest.raises(DataError, match=r"rms_norm_eps: found .*; wanted a number above 0"):
        ConfigReader({"rms_norm_eps": value}).number("rms_norm_eps")


def test_a_model_of_a_billion_layers_is_refused_at_once():
    with pytest.raises(
        DataError, match="num_hidden_layers: found 1000000000; wanted a whole number of at most 10000"
    ):
        LLAMA.architecture(LLAMA_3_2_1B | {"num_hidden_layers": 10**9})
