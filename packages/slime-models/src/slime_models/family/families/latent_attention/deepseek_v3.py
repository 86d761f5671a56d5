"""DeepSeek-V3 and R1, Moonlight, and Kimi-K2 under a name of its own: latent attention, dense layers first, then experts in groups beside a shared one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.dense import IGNORED
from slime_models.family.families.glm4_moe import first_layers, with_shared_experts
from slime_models.family.families.latent_attention.rules import (
    DECODER,
    LAYERS,
    MEMORY,
    latent_architecture,
    latent_rules,
    require_deepseek_router,
)
from slime_models.family.family import EMBEDDING_WEIGHT, OUTPUT_WEIGHT, ModelFamily
from slime_models.family.rules import mtp_rules

#: What a file that does not say means: DeepSeek-V3's own sizes.
DEFAULTS: Mapping[str, int] = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
}  # fmt: skip


def read_architecture(config: Mapping[str, Any], *, model_type: str = "deepseek_v3") -> Architecture:
    """Read a DeepSeek-V3 config.json, of transformers or of DeepSeek's own code."""
    read = ConfigReader(config)
    require_deepseek_router(read)
    common = latent_architecture(config, model_type=model_type, defaults=DEFAULTS)
    return with_shared_experts(
        common,
        read,
        dense_layers=first_layers(read, common.num_layers, default=3),
        defaults=DEFAULTS,
        scaling=2.5,
    )


_DECODER = latent_rules()

#: MTP layers are numbered after the decoder's, as those of GLM-4.5.
DEEPSEEK_V3 = ModelFamily(
    model_type="deepseek_v3",
    rules=(*_DECODER, *mtp_rules(_DECODER)),
    architecture=read_architecture,
    layers=LAYERS,
    memory=MEMORY,
    decoder=DECODER,
    not_served_on_cpu={
        "sglang": "SGLang 0.5.23 has no latent attention on a CPU, and nobody has tried it on a GPU with weights that a trainer sends"
    },
    mtp_prefix="model.layers.{layer}.",
    ignored=IGNORED,  # Moonlight and Kimi-K2 have them
    copies={"embed_tokens.weight": EMBEDDING_WEIGHT, "shared_head.head.weight": OUTPUT_WEIGHT},
)

#: Kimi-K2's folders have another `model_type`, and DeepSeek-V3's class as their architecture; transformers 5.19 knows neither name.
KIMI_K2 = dataclasses.replace(
    DEEPSEEK_V3, model_type="kimi_k2", architecture=partial(read_architecture, model_type="kimi_k2")
)
