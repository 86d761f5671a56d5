"""Hooks of slime-sglang. Imports neither torch nor sglang."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping

from slime_core.config.sections import RolloutSection
from slime_core.config.settings import Settings
from slime_core.errors import Problem
from slime_core.plugins.hooks import Section, hookimpl

from slime_sglang.section import SglangSection


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the section `sglang`."""
    return [Section("sglang", SglangSection)]


@hookimpl
def slime_check_config(settings: Settings) -> Iterable[Problem]:
    """Refuse training on log-probs that are not those of the distribution sampled from."""
    rollout = settings.section(RolloutSection)
    if rollout.rollout_engine != "sglang":
        return
    for name, value, neutral, why in (
        ("rollout_top_p", rollout.rollout_top_p, 1.0, "reports log-probs from before top-p"),
        ("rollout_top_k", rollout.rollout_top_k, -1, "reports log-probs from before top-k"),
        ("rollout_min_new_tokens", rollout.rollout_min_new_tokens, 0, "forbids the tokens that would end it"),
    ):
        if value != neutral:
            yield Problem(
                f"rollout.{name}",
                str(value),
                str(neutral),
                f"SGLang {why}, and its log-probs would not be those of the policy that is trained; "
                "the engine torch has no such limit",
            )


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the version of SGLang."""
    try:
        return {"sglang": importlib.metadata.version("sglang")}
    except importlib.metadata.PackageNotFoundError:
        return {"sglang": "not installed; slime-sglang needs it"}
