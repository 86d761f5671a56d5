"""GLM-4.7-Flash: latent attention, a dense layer first, then experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.glm4_moe import with_shared_experts
from slime_models.family.families.latent_attention.rules import (
    DECODER,
    LAYERS,
    MEMORY,
    dense_layers,
    latent_architecture,
    latent_rules,
    require_deepseek_router,
)
from slime_models.family.family import EMBEDDING_WEIGHT, OUTPUT_WEIGHT, ModelFamily
from slime_models.family.rules import mtp_rules

#: What a file that does not say means: GLM-4.7-Flash's own sizes.
DEFAULTS: Mapping[str, int] = {
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a GLM-4.7-Flash config.json. Where the file does not say, the first layer alone is dense, as in transformers."""
    read = ConfigReader(config)
    require_deepseek_router(read)
    common = latent_architecture(config, model_type="glm4_moe_lite", defaults=DEFAULTS, norm_epsilon=1e-5)
    if read.get("mlp_layer_types") is None:
        read.require("first_k_dense_replace", (1,), default=1)
    return with_shared_experts(
        common,
        read,
        dense_layers=dense_layers(read, common.num_layers, default=1),
        defaults=DEFAULTS,
        scaling=1.8,
    )


_DECODER = latent_rules()

GLM4_MOE_LITE = ModelFamily(
    model_type="glm4_moe_lite",
    rules=(*_DECODER, *mtp_rules(_DECODER)),
    architecture=read_architecture,
    layers=LAYERS,
    memory=MEMORY,
    decoder=DECODER,
    not_served_on_cpu={
        "sglang": "SGLang 0.5.23 computes rotary angles of latent attention on a CPU with yarn alone, and nobody has tried it on a GPU"
    },
    mtp_prefix="model.layers.{layer}.",
    copies={"embed_tokens.weight": EMBEDDING_WEIGHT, "shared_head.head.weight": OUTPUT_WEIGHT},
)
