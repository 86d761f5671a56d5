"""GLM-5: latent attention to the tokens that an indexer chooses, in every layer anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.latent_attention.rules import DECODER
from slime_models.family.families.latent_attention.sparse import (
    LAYERS,
    MEMORY,
    NOT_SERVED,
    RULES,
    sparse_architecture,
)
from slime_models.family.family import ModelFamily

#: What a file that does not say means: GLM-5's own sizes.
DEFAULTS: Mapping[str, int] = {
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1,
    "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128,
}  # fmt: skip
_SHARED = "'full': layers that share what another one's indexer chose are not implemented"


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a GLM-5 config.json."""
    read = ConfigReader(config)
    for index, kind in enumerate(read.get("indexer_types") or ()):
        if kind != "full":
            raise read.error(f"indexer_types[{index}]", kind, _SHARED)
    if read.get("indexer_types") is None:
        read.require("index_topk_freq", (0, 1), default=1)
        pattern = read.get("index_topk_pattern")
        if pattern is not None and set(pattern) - {"F", "full"}:
            raise read.error("index_topk_pattern", pattern, _SHARED)
    return sparse_architecture(
        config, model_type="glm_moe_dsa", defaults=DEFAULTS, norm_epsilon=1e-5, index_interleaved=True
    )


#: Its MTP layers are copied from folder to folder, and not trained.
GLM_MOE_DSA = ModelFamily(
    model_type="glm_moe_dsa",
    rules=RULES,
    architecture=read_architecture,
    layers=LAYERS,
    memory=MEMORY,
    decoder=DECODER,
    mtp_prefix="model.layers.{layer}.",
    not_served_on_cpu=NOT_SERVED,
)
