"""What tiny random models of the tests are: their families, and what their config.json says beside the usual."""

from __future__ import annotations

from slime_example_family.family import GEMMA3
from slime_models.family.families.glm import GLM as GLM_OF_2024
from slime_models.family.families.glm4 import GLM4
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.family.families.gpt_oss import GPT_OSS
from slime_models.family.families.latent_attention.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from slime_models.family.families.latent_attention.deepseek_v32 import DEEPSEEK_V32
from slime_models.family.families.latent_attention.glm4_moe_lite import GLM4_MOE_LITE
from slime_models.family.families.latent_attention.glm_moe_dsa import GLM_MOE_DSA
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.mimo import MIMO
from slime_models.family.families.minimax_m2 import MINIMAX_M2
from slime_models.family.families.qwen2 import QWEN2
from slime_models.family.families.qwen2_moe import QWEN2_MOE
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.family.families.qwen3_next import QWEN3_NEXT

FAMILIES = {
    family.model_type: family
    for family in (
        *(DEEPSEEK_V3, KIMI_K2, DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA),
        *(GEMMA3, GLM_OF_2024, GLM4, GLM4_MOE, GPT_OSS, LLAMA, MIMO, MINIMAX_M2),
        *(
            QWEN2,
            QWEN2_MOE,
            QWEN3,
            QWEN3_MOE,
            QWEN3_NEXT,
            QWEN3_5,
            QWEN3_5_MOE,
            QWEN3_5_MOE_TEXT,
            QWEN3_5_TEXT,
        ),
    )
}
VOCAB = 250
#: A dense layer, then layers of four experts, of which a token passes two beside a shared one.
GLM = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "use_qk_norm": True,
}

#: An indexer that chooses 6 earlier tokens.
INDEXER = {"index_topk": 6, "index_n_heads": 20, "index_head_dim": 14}
#: A delta net, then full attention.
DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-2,  # a delta net's output is divided by its own size, which may be near zero
}
#: Latent attention whose queries and keys are wider than values; a dense layer, then four groups of two experts, of which a
#: token passes four of two groups.
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
}
