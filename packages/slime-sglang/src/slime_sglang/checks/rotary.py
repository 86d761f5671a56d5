"""Checks of rotary scaling: that servers and trainer compute the same cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import DataError, PluginError, Problem
from slime_models.family.architecture import ConfigReader
from slime_models.family.yarn import YarnScaling
from slime_models.hf.config import read_config

from slime_sglang.settings.model_family import model_family
from slime_sglang.settings.section import SglangSection

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext

#: SGLang's own argument, which Qwen3-MoE heeds on a GPU.
_FUSED = "enable_fused_qk_norm_rope"
#: How far apart the two may be, relatively: files have one of them in decimals.
_APART = 1e-6


def rotary_problems(build: BuildContext, folder: Path, *, where: str) -> Iterator[Problem]:
    """Yield that servers would stretch otherwise than the trainer by YaRN: SGLang does not read its `attention_factor`.

    Args:
        build: of a run with a trainer.
        folder: from which servers start.
        where: the setting that names it.
    """
    try:
        config = read_config(folder)
        scaling = model_family(build).architecture(config).rope_scaling
    except (DataError, PluginError):
        return  # whoever needs them says so
    table = ConfigReader(config).rope_table()
    if table is None or not isinstance(scaling, YarnScaling):
        return
    if build.section(SglangSection).server_args.get(_FUSED):
        yield Problem(
            f"sglang.server_args.{_FUSED}",
            f"it with {folder}, whose config.json has rotary scaling by yarn",
            "nothing",
            "SGLang 0.5.23's kernel stretches by max_position_embeddings / original_max_position_embeddings, and not by factor",
        )
    served = table.implied_attention_factor(scaling.factor)
    if math.isclose(served, scaling.attention_factor, rel_tol=_APART):
        return
    fitting = table.number("attn_factor", 1.0) * scaling.attention_factor / served
    yield Problem(
        where,
        f"{folder}, whose config.json has the attention_factor {scaling.attention_factor:g} of yarn",
        f'"attn_factor": {fitting!r} beside it',
        f"SGLang 0.5.23 reads attn_factor in its place, and would multiply cosine and sine by {served:g}: log-probs would not be "
        "those of the policy that is trained; the engine torch reads attention_factor",
    )
