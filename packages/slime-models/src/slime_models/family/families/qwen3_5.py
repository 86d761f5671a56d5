"""Qwen 3.5, dense and with experts, the text model: alone, or beside a vision tower that is copied as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.delta_net import (
    DECODER,
    LAYERS,
    MEMORY,
    NOT_PARALLEL,
    NOT_SERVED,
    SEPARATE_PROJECTION,
    delta_net_architecture,
    delta_net_rules,
)
from slime_models.family.families.dense import DOWN, GATE_UP
from slime_models.family.families.qwen3_moe import with_experts
from slime_models.family.families.qwen3_next import EXPERTS
from slime_models.family.family import ModelFamily
from slime_models.family.rules import Rule

_Read = Callable[..., Architecture]
#: The part of config.json that describes the text model, where the folder has a vision tower too.
_TEXT = "text_config"


def _dense(config: Mapping[str, Any], *, model_type: str, where: str = "config.json") -> Architecture:
    """Read the text model without experts."""
    return delta_net_architecture(config, model_type=model_type, where=where)


def _with_experts(config: Mapping[str, Any], *, model_type: str, where: str = "config.json") -> Architecture:
    """Read the text model with experts, which every layer has; gates of a token always sum to 1."""
    read = ConfigReader(config, where)
    read.require("norm_topk_prob", (True,), default=True)
    read.require("mlp_only_layers", ([],), default=[])
    read.require("decoder_sparse_step", (1,), default=1)
    shared = read.integer("shared_expert_intermediate_size", 512)
    without = delta_net_architecture(
        {"intermediate_size": shared, **config}, model_type=model_type, where=where
    )
    return dataclasses.replace(
        with_experts(without, read, top_k=8, width=512),
        moe_norm_topk_prob=True,
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=True,
    )


def _nested(config: Mapping[str, Any], *, model_type: str, text: _Read) -> Architecture:
    """Read the text model of a folder that has a vision tower too, or had one."""
    read = ConfigReader(config)
    read.require("model_type", (model_type,), default=None)
    inner = read.get(_TEXT)
    if not isinstance(inner, Mapping):
        raise read.error(_TEXT, inner, "a table: the text model")
    outer = read.get("tie_word_embeddings")
    if inner.get("tie_word_embeddings", outer) != outer and outer is not None:
        raise read.error("tie_word_embeddings", outer, f"what {_TEXT} says, {inner['tie_word_embeddings']}")
    kind = f"{model_type}_text"
    tied = {} if outer is None else {"tie_word_embeddings": outer}
    found = text({"model_type": kind, **inner, **tied}, model_type=kind, where=f"config.json: {_TEXT}")
    return dataclasses.replace(found, model_type=model_type)


def _families(model_type: str, mlp: tuple[Rule, ...], text: _Read) -> tuple[ModelFamily, ModelFamily]:
    """Return the family of published folders, and that of folders which transformers writes of the text model."""
    alone = ModelFamily(
        model_type=f"{model_type}_text",
        rules=delta_net_rules(SEPARATE_PROJECTION, mlp),
        architecture=partial(text, model_type=f"{model_type}_text"),
        carried=("mtp.",),
        layers=LAYERS,
        memory=MEMORY,
        decoder=DECODER,
        not_served_on_cpu=NOT_SERVED,
        not_updated={
            "sglang": "slime-sglang does not find the four projections into a delta net in SGLang's in_proj_qkvz and in_proj_ba: no "
            "update could be proven"
        },
        not_parallel=NOT_PARALLEL,
    )
    published = dataclasses.replace(
        alone,
        model_type=model_type,
        rules=delta_net_rules(SEPARATE_PROJECTION, mlp, prefix="model.language_model."),
        architecture=partial(_nested, model_type=model_type, text=text),
        carried=("mtp.", "model.visual."),
    )
    return published, alone


#: Published folders hold the experts of a layer in two tensors; transformers reads these, and writes each expert by itself.
_STACKED = {
    "mlp.experts.gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "mlp.experts.down_proj": ("down_proj.weight",),
}
QWEN3_5, QWEN3_5_TEXT = _families("qwen3_5", (GATE_UP, DOWN), _dense)
QWEN3_5_MOE, QWEN3_5_MOE_TEXT = (
    dataclasses.replace(family, stacked=_STACKED)
    for family in _families("qwen3_5_moe", EXPERTS, _with_experts)
)
