"""Families keep the promises of the trainer's kit, which tells what breaks one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from slime_core.errors import ContractError, PluginError
from slime_megatron.testing import check_trained_family, random_model
from slime_models.family.families.glm import GLM
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
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.family.family import ModelFamily

SIZE = {
    "vocab_size": 251,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
#: gpt-oss's, of a shorter context; its dimensions go over from one kind to the other within a head of 16.
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
#: As the model cards of Qwen have it, of a shorter context than that of the longest sequences.
QWEN_YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
FEW_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
#: Latent attention, a dense layer, then experts of which a token passes four.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,  # that of latent vectors is another
    "tie_word_embeddings": False,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
#: Each token sees 11 others: the longest sequence has 61.
INDEXER = {"index_topk": 11, "index_n_heads": 20, "index_head_dim": 14, "first_k_dense_replace": 1}
#: Family, and what its config.json says beside the sizes; the quirks of models that are published.
MODELS = {
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        LATENT | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "DeepSeek-V3, other factors of YaRN": (
        DEEPSEEK_V3,
        LATENT
        | {"first_k_dense_replace": 2, "rope_interleave": False}
        | {
            "rope_parameters": YARN
            | {"mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 8, "truncate": False}
        },
    ),
    "Kimi-K2": (
        KIMI_K2,
        LATENT | {"first_k_dense_replace": 1, "rope_parameters": YARN | {"beta_fast": 1, "rope_theta": 5e4}},
    ),
    "Moonlight": (
        DEEPSEEK_V3,
        LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_shared_experts": 2, "v_head_dim": 20},
    ),
    "GLM-4.7-Flash": (
        GLM4_MOE_LITE,
        LATENT | {"v_head_dim": 24, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "DeepSeek-V3.2": (
        DEEPSEEK_V32,
        LATENT | INDEXER | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "GLM-5": (GLM_MOE_DSA, LATENT | INDEXER | {"v_head_dim": 24}),
    "GLM-4-9B of 2024": (GLM, {"head_dim": 32, "rms_norm_eps": 1e-5}),
    "gpt-oss": (
        GPT_OSS,
        FEW_EXPERTS | {"head_dim": 16, "sliding_window": 9, "rope_parameters": GPT_OSS_YARN},
    ),
    "gpt-oss, limits that clamp": (
        GPT_OSS,
        FEW_EXPERTS
        | {"head_dim": 16, "swiglu_limit": 0.5, "swiglu_alpha": 1.3, "layer_types": ["full_attention"] * 3},
    ),
    "MiniMax-M2": (MINIMAX_M2, FEW_EXPERTS | {"head_dim": 32, "rotary_dim": 16}),
    "GLM-4-9B": (
        GLM4,
        {"head_dim": 32, "attention_bias": True, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    ),
    "GLM-4-32B": (GLM4, {"head_dim": 32, "attention_bias": False, "tie_word_embeddings": False}),
    "Llama 3.1": (LLAMA, {"rope_parameters": LLAMA_31, "tie_word_embeddings": False}),
    "Llama 3.2": (LLAMA, {"rope_parameters": LLAMA_31 | {"factor": 32.0}, "tie_word_embeddings": True}),
    "Qwen2.5": (
        QWEN2,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True},
    ),
    "Qwen1.5 MoE": (
        QWEN2_MOE,
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "Qwen3 MoE with dense layers": (
        QWEN3_MOE,
        {
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        }
        | {"mlp_only_layers": [1], "tie_word_embeddings": False},
    ),
    "GLM-4.5": (
        GLM4_MOE,
        {
            "head_dim": 32,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3": (QWEN3, {"head_dim": 32, "tie_word_embeddings": True}),
    "Qwen3, YaRN": (QWEN3, {"head_dim": 32, "rope_parameters": QWEN_YARN, "tie_word_embeddings": False}),
    "Qwen3, YaRN with a factor of its own": (
        QWEN3,
        {"head_dim": 32, "rope_parameters": QWEN_YARN | {"attention_factor": 0.88}},
    ),
    "Qwen2.5, YaRN in the older spelling": (
        QWEN2,
        {
            "rope_theta": 1e3,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
}

#: Family that transformers has no class for -> that of the same layers.
LIKE = {"kimi_k2": "deepseek_v3"}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=pytest.mark.proves(family.model_type, "train", "convert", "lora"))
        for model, (family, _) in MODELS.items()
    ],
)
def test_a_family_computes_what_transformers_does(model, tmp_path):
    family, changes = MODELS[model]
    like = LIKE.get(family.model_type)
    folder = random_model({"model_type": like or family.model_type} | SIZE | changes, tmp_path / "hf")
    if like is not None:
        config = json.loads((folder / "config.json").read_text()) | {"model_type": family.model_type}
        (folder / "config.json").write_text(json.dumps(config))
    check_trained_family(family, folder, like=like)


def broken(family: ModelFamily, **changes) -> ModelFamily:
    """Return the family with an architecture that reads a config.json otherwise."""
    return replace(family, architecture=lambda config: replace(family.architecture(config), **changes))


def test_a_family_that_computes_something_else_is_told(tmp_path):
    family, changes = MODELS["GLM-4-9B"]
    folder = random_model({"model_type": "glm4"} | SIZE | changes, tmp_path / "hf")
    with pytest.raises(ContractError, match=r"family glm4: logits: found a difference of .*; wanted at most"):
        check_trained_family(broken(family, rotary_interleaved=False), folder)
    with pytest.raises(
        ContractError, match=r"weights of the model: found .*post_mlp_layernorm.*; wanted those of the rules"
    ):
        check_trained_family(broken(family, post_layernorms=False), folder)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("nowhere.at_all:LAYERS", r"layers: nowhere\.at_all:LAYERS cannot be imported: ModuleNotFoundError"),
        (
            "slime_megatron.model.layers.norm:RMSNorm",
            r"layers: slime_megatron\.model\.layers\.norm:RMSNorm is a type; wanted a FamilyLayers",
        ),
    ],
)
def test_layers_that_a_family_names_wrongly_are_refused(layers, message):
    from slime_megatron.model.family_layers import layers_of

    architecture = LLAMA.architecture({"model_type": "llama"} | SIZE)
    with pytest.raises(PluginError, match=message):
        layers_of(replace(LLAMA, layers=layers), architecture)
