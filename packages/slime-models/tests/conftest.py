"""Fixtures of the model tests: tiny models of each family, and the real SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slime_models.family.families.glm import GLM as GLM_OF_2024
from slime_models.family.families.glm4 import GLM4
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.family.families.gpt_oss import GPT_OSS
from slime_models.family.families.latent_attention.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from slime_models.family.families.latent_attention.deepseek_v32 import DEEPSEEK_V32
from slime_models.family.families.latent_attention.glm4_moe_lite import GLM4_MOE_LITE
from slime_models.family.families.latent_attention.glm_moe_dsa import GLM_MOE_DSA
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.minimax_m2 import MINIMAX_M2
from slime_models.family.families.qwen2 import QWEN2
from slime_models.family.families.qwen2_moe import QWEN2_MOE
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.family.families.qwen3_next import QWEN3_NEXT
from slime_models.family.family import ModelFamily
from slime_models.hf.fetch import fetch

#: Families with gated delta nets.
DELTA_NETS = (QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT)
FAMILIES = {
    family.model_type: family
    for family in (
        *(DEEPSEEK_V3, KIMI_K2, DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA),
        *(GLM_OF_2024, GLM4, GLM4_MOE, GPT_OSS, LLAMA),
        *(MINIMAX_M2, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, *DELTA_NETS),
    )
}

#: Three experts of 10, of which a token passes two.
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "norm_topk_prob": True}
#: The second of two layers: of three experts of 10 a token passes two, beside a shared one of 20.
GLM = {
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.34,
}
#: Latent attention: heads of 6 and 4 rotated for queries and keys, of 7 for values; then GLM's experts.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 13,
    "kv_lora_rank": 11,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
#: The second of two layers has attention; a delta net has two key heads, of which each has three value heads.
DELTA_NET = {
    "partial_rotary_factor": 0.34,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}
#: A vision tower beside a text model, for which the tables of Qwen 3.5 have no rules.
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "intermediate_size": 8,
    "out_hidden_size": 20,
    "num_position_embeddings": 4,
}
#: 4 query heads in 2 groups, heads of 6: no two sizes are equal by accident.
TINY = {
    "vocab_size": 37,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def tiny_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model; Qwen 2's heads are hidden_size / num_attention_heads wide."""
    config = {"model_type": model_type, **TINY, **changes}
    if model_type in ("qwen2", "qwen2_moe"):
        del config["head_dim"]
    if model_type == "qwen2_moe":
        config = {**config, **EXPERTS, "shared_expert_intermediate_size": 14, **changes}
    if model_type == "mimo":
        config = {**config, "num_nextn_predict_layers": 0, **changes}
    if model_type == "qwen3_moe":
        config = {**config, **EXPERTS, **changes}
    if model_type in ("gpt_oss", "minimax_m2"):
        config = {**config, "num_local_experts": 3, "num_experts_per_tok": 2, **changes}
    if model_type == "minimax_m2":
        config = {**config, "rotary_dim": 2, **changes}
    if model_type in ("glm", "glm4"):
        config = {
            **config,
            "attention_bias": True,
            "partial_rotary_factor": 0.34,
            "pad_token_id": None,
            **changes,
        }
    if model_type == "glm4_moe":
        config = {**config, **GLM, **changes}
    if model_type in ("deepseek_v3", "kimi_k2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"):
        del config["head_dim"]
        config = {**config, **LATENT, **changes}
    if model_type in ("deepseek_v32", "glm_moe_dsa"):
        config = {**config, "index_topk": 9, "index_n_heads": 3, "index_head_dim": 5, **changes}
    if model_type in {family.model_type for family in DELTA_NETS}:
        experts = {} if model_type in ("qwen3_5", "qwen3_5_text") else EXPERTS
        config = {**config, **DELTA_NET, **experts, **changes}
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        text = {**config, "model_type": f"{model_type}_text"}
        tied = {name: value for name, value in text.items() if name == "tie_word_embeddings"}
        config = {"model_type": model_type, "text_config": text, "vision_config": VISION, **tied}
    return config


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> ModelFamily:
    return FAMILIES[request.param]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def config(request: pytest.FixtureRequest, family: ModelFamily) -> dict[str, Any]:
    return tiny_config(family.model_type, tie_word_embeddings=request.param)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch("smollm2-135m", models_dir=tmp_path_factory.mktemp("models"))
