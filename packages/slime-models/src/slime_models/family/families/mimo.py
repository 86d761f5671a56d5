"""MiMo-7B, dense, with a multi-token prediction (MTP) layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.dense import QKV_BIAS, dense_architecture, dense_rules
from slime_models.family.family import ModelFamily
from slime_models.family.rules import MtpNames, mtp_rules


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a MiMo config.json. Queries, keys and values have a bias."""
    dense = dense_architecture(config, model_type="mimo", qkv_bias=True)
    read = ConfigReader(config)
    n_mtp = 0 if read.get("num_nextn_predict_layers") == 0 else read.integer("num_nextn_predict_layers", 1)
    return dataclasses.replace(dense, mtp_num_layers=n_mtp)


_DECODER = dense_rules(QKV_BIAS)
#: Source: `mimo_mtp.py` of SGLang 0.5.23.
_MTP_NAMES = MtpNames(
    prefix="model.mtp_layers.{mtp}.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    hidden_first=True,
)

#: As Qwen 2; transformers has no class for it.
MIMO = ModelFamily(
    model_type="mimo",
    rules=(*_DECODER, *mtp_rules(_DECODER, _MTP_NAMES)),
    architecture=read_architecture,
    mtp_prefix=_MTP_NAMES.prefix,
)
