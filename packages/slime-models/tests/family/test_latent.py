"""What config.json says of latent attention: published sizes, YaRN, and what is refused by the name of its field."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from slime_core.errors import DataError
from slime_models.family.families.latent_attention.deepseek_v3 import DEEPSEEK_V3
from slime_models.family.families.latent_attention.deepseek_v32 import DEEPSEEK_V32
from slime_models.family.families.latent_attention.glm4_moe_lite import GLM4_MOE_LITE
from slime_models.family.families.latent_attention.glm_moe_dsa import GLM_MOE_DSA
from slime_models.family.families.latent_attention.rules import LatentArchitecture
from slime_models.family.families.latent_attention.sparse import SparseArchitecture
from slime_models.family.rotary import half_tables
from slime_models.family.yarn import YarnScaling

#: Of deepseek-ai/DeepSeek-V3.
V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu", "moe_layer_freq": 1,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False, "attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
#: Of moonshotai/Moonlight-16B-A3B, what is otherwise.
MOONLIGHT = {
    "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_group": 1,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "topk_group": 1,
    "n_routed_experts": 64, "routed_scaling_factor": 2.446, "q_lora_rank": None, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "rope_scaling": None, "num_nextn_predict_layers": 0,
}  # fmt: skip
#: Of zai-org/GLM-4.7-Flash.
FLASH = {
    "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
    "n_shared_experts": 1, "n_routed_experts": 64, "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "norm_topk_prob": True, "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 1.0,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "topk_method": "noaux_tc",
}  # fmt: skip


def numbers(family, config):
    architecture = family.architecture(config)
    return architecture, sum(math.prod(shape) for shape in family.hf_shapes(architecture).values())


def test_deepseek_v3_has_671_thousand_million_numbers() -> None:
    read, count = numbers(DEEPSEEK_V3, V3)
    assert isinstance(read, LatentArchitecture)
    assert round(count / 1e9) == 671
    assert (read.head_dim, read.rotary_dim, read.latent_size, read.value_size) == (192, 64, 576, 16384)
    assert (read.moe_layers[0], read.moe_router_num_groups, read.moe_router_group_topk) == (3, 8, 4)
    assert (read.rotary_interleaved, read.mtp_num_layers) == (True, 1)
    # 0.1 ln 40 + 1, squared, over the root of 192; cosines and sines stay: both weights are 1
    assert read.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert isinstance(read.rope_scaling, YarnScaling)
    assert read.rope_scaling.attention_factor == 1.0
    assert read.attention_size == 7168 * 1536 + 1536 * 24576 + 7168 * 576 + 512 * 32768 + 16384 * 7168


def test_moonlight_has_queries_without_a_latent_vector_and_plain_angles() -> None:
    read, count = numbers(DEEPSEEK_V3, V3 | MOONLIGHT)
    assert isinstance(read, LatentArchitecture)
    assert round(count / 1e9) == 16
    assert (read.q_lora_rank, read.rope_scaling, read.rope_theta, read.moe_router_num_groups) == (
        None,
        None,
        5e4,
        None,
    )
    assert (read.moe_shared_expert_intermediate_size, read.softmax_scale) == (2816, 192**-0.5)
    assert read.attention_size == 2048 * 3072 + 2048 * 576 + 512 * 4096 + 2048 * 2048


def test_glm_4_7_flash_has_values_as_wide_as_queries() -> None:
    read, count = numbers(GLM4_MOE_LITE, FLASH)
    assert round(count / 1e9) == 30
    assert (read.head_dim, read.v_head_dim, read.dense_layers, read.norm_epsilon) == (256, 256, (0,), 1e-5)
    kinds = {"mlp_layer_types": ["dense", "dense", *["sparse"] * 45], "first_k_dense_replace": None}
    assert GLM4_MOE_LITE.architecture(FLASH | kinds).dense_layers == (0, 1)


def test_rotary_fields_of_newer_files_mean_the_same() -> None:
    old = dict(V3)
    parameters = {"rope_theta": old.pop("rope_theta"), **old.pop("rope_scaling")}
    parameters["rope_type"] = parameters.pop("type")
    assert DEEPSEEK_V3.architecture({**old, "rope_parameters": parameters}) == DEEPSEEK_V3.architecture(V3)


def test_yarn_leaves_fast_pairs_and_divides_slow_ones_by_its_factor() -> None:
    """A pair turns theta ** (-i / 32) radians a token. Of the first 4,096 tokens: i = 0 turns 652 times, which is more than 32;
    i = 31 turns 0.09 times, which is less than 1. Position 1 shows the angle."""
    read = DEEPSEEK_V3.architecture(V3)
    assert isinstance(read, LatentArchitecture)
    cosine, sine = half_tables(read, 2)
    angles = torch.atan2(sine[1], cosine[1])
    assert angles[0].item() == pytest.approx(1.0, rel=1e-6)
    assert angles[31].item() == pytest.approx(1e4 ** (-31 / 32) / 40, rel=1e-4)
    between = angles[16].item() / 1e4 ** (-16 / 32)
    assert 1 / 40 < between < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank: found 0; wanted a whole number of at least 1"),
        ({"q_lora_rank": "1536"}, "q_lora_rank: found '1536'; wanted a whole number"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: found 63; wanted an even number"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: found 8; wanted num_attention_heads, 128"),
        ({"attention_bias": True}, "attention_bias: found True"),
        ({"attention_dropout": 0.1}, "attention_dropout: found 0.1; wanted 0"),
        ({"scoring_func": "softmax"}, "scoring_func: found 'softmax'; wanted 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method: found 'greedy'; wanted 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: found 2; wanted 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob: found False; wanted True"),
        ({"topk_group": 2}, "topk_group: found 2; wanted half of num_experts_per_tok, 8"),
        ({"n_group": 7}, "n_group: found 7; wanted a divisor of n_routed_experts, 256"),
        (
            {"first_k_dense_replace": 61},
            "first_k_dense_replace: found 61; wanted less than num_hidden_layers",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5; wanted 1.0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type: found 'linear'; wanted 'default' or 'yarn'",
        ),
        (
            {"rope_scaling": V3["rope_scaling"] | {"long_factor": [1]}},
            "long_factor: found [1]; wanted nothing",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "original_max_position_embeddings: found None"),
    ],
)
def test_what_is_not_supported_is_refused_by_the_name_of_its_field(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        DEEPSEEK_V3.architecture(V3 | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": 2}, "first_k_dense_replace: found 2; wanted 1"),
        (
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types: found ['dense']; wanted a list of num_hidden_layers, 47",
        ),
        (
            {"mlp_layer_types": ["moe", *["sparse"] * 46]},
            "mlp_layer_types[0]: found 'moe'; wanted 'dense' or 'sparse'",
        ),
        (
            {"mlp_layer_types": ["sparse"] * 47},
            "first_k_dense_replace: found 1; wanted what mlp_layer_types says",
        ),
    ],
)
def test_layers_without_experts_are_told_by_one_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        GLM4_MOE_LITE.architecture(FLASH | changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (DEEPSEEK_V32, {"q_lora_rank": None}, "q_lora_rank: found None"),
        (
            DEEPSEEK_V32,
            {"index_head_dim": 32},
            "index_head_dim: found 32; wanted at least qk_rope_head_dim, 64",
        ),
        (DEEPSEEK_V32, {"layer_types": ["full_attention"]}, "layer_types[0]: found 'full_attention'"),
        (DEEPSEEK_V32, {"rope_interleave": False}, "rope_interleave: found False; wanted True"),
        (
            GLM_MOE_DSA,
            {"indexer_types": ["full", "shared"]},
            "indexer_types[1]: found 'shared'; wanted 'full'",
        ),
        (GLM_MOE_DSA, {"index_topk_freq": 4}, "index_topk_freq: found 4; wanted 0 or 1"),
        (GLM_MOE_DSA, {"index_topk_pattern": "FS"}, "index_topk_pattern: found 'FS'; wanted 'full'"),
    ],
)
def test_indexers_that_are_not_supported_are_refused_by_their_field(family, changes, message) -> None:
    config = V3 | {"model_type": family.model_type}
    read = family.architecture(config)
    assert isinstance(read, SparseArchitecture)
    assert (read.index_topk, read.index_head_dim) == (2048, 128)
    with pytest.raises(DataError, match=re.escape(message)):
        family.architecture(config | changes)


@pytest.mark.parametrize("family", [DEEPSEEK_V32, GLM_MOE_DSA], ids=lambda family: family.model_type)
@pytest.mark.parametrize("word", ["indexed_attention", "deepseek_sparse_attention"])
def test_both_words_of_transformers_for_layers_with_an_indexer_mean_the_same(family, word) -> None:
    config = V3 | {"model_type": family.model_type}
    assert family.architecture(config | {"layer_types": [word] * 61}) == family.architecture(config)


def test_the_indexer_is_in_folders_and_not_trained() -> None:
    read = DEEPSEEK_V32.architecture(V3 | {"model_type": "deepseek_v32", "num_hidden_layers": 4})
    own = {name for name in DEEPSEEK_V32.hf_shapes(read) if ".indexer." in name and ".layers.0." in name}
    assert {name.split("indexer.")[1] for name in own} == {
        "wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight",
    }  # fmt: skip
    assert not any("indexer" in name for name in DEEPSEEK_V32.parameter_names(read))
