"""YaRN in the engine: tokens and log-probs of transformers, at positions behind the original context, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.qwen2 import QWEN2
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.family.yarn import YarnScaling
from slime_models.hf.config import read_config
from slime_torch.testing import check_served_family
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 251, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1, "tie_word_embeddings": False,
    "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
#: As model cards have it, of a context of 16 tokens; sequences have up to 44. Angles go over within a head of 32.
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
OLDER = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "qwen3": (QWEN3, {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3, its own attention factor": (
        QWEN3,
        {"head_dim": 32, "rope_parameters": YARN | {"attention_factor": 0.88}},
    ),
    "qwen3, what SGLang reads, too": (
        QWEN3,
        {
            "head_dim": 32,
            "rope_parameters": YARN | {"attention_factor": 1.0, "attn_factor": 0.8782488562869419},
        },
    ),
    "qwen2, the older spelling": (QWEN2, {"rope_theta": 1e3, "rope_scaling": OLDER}),
    "qwen3_moe": (QWEN3_MOE, EXPERTS | {"head_dim": 32, "rope_parameters": YARN}),
    "llama": (LLAMA, {"rope_parameters": YARN}),
}


@pytest.mark.parametrize(
    ("model", "with_kernels"),
    [*((model, True) for model in MODELS), ("qwen3, its own attention factor", False)],
)
def test_yarn_is_computed_as_transformers_does(model: str, with_kernels: bool, tmp_path: Any) -> None:
    family, changes = MODELS[model]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **SIZES | changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    assert isinstance(family.architecture(read_config(tmp_path)).rope_scaling, YarnScaling)
    check_served_family(family, tmp_path, with_kernels=with_kernels)
