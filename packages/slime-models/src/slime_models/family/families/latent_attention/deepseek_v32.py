"""DeepSeek-V3.2: DeepSeek-V3 whose attention sees the tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture
from slime_models.family.families.latent_attention import deepseek_v3
from slime_models.family.families.latent_attention.rules import DECODER
from slime_models.family.families.latent_attention.sparse import (
    LAYERS,
    MEMORY,
    NOT_SERVED,
    RULES,
    sparse_architecture,
)
from slime_models.family.family import ModelFamily

#: What a file that does not say means: DeepSeek-V3.2's own sizes.
DEFAULTS: Mapping[str, int] = {
    **deepseek_v3.DEFAULTS, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
}  # fmt: skip


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a DeepSeek-V3.2 config.json."""
    return sparse_architecture(
        config, model_type="deepseek_v32", defaults=DEFAULTS, norm_epsilon=1e-6, index_interleaved=False
    )


#: Its MTP layers are copied from folder to folder, and not trained.
DEEPSEEK_V32 = ModelFamily(
    model_type="deepseek_v32",
    rules=RULES,
    architecture=read_architecture,
    layers=LAYERS,
    memory=MEMORY,
    decoder=DECODER,
    mtp_prefix="model.layers.{layer}.",
    not_served_on_cpu=NOT_SERVED,
)
