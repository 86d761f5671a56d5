"""Hooks of slime-sglang. Imports neither torch nor sglang."""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Iterable, Mapping

from slime_core.config.sections import RolloutSection, TrainSection
from slime_core.config.settings import Settings
from slime_core.errors import Problem
from slime_core.plugins.hooks import ForeignFlags, Section, hookimpl
from slime_core.weights import transport_problems

from slime_sglang.section import DERIVED, TRANSPORTS, SglangSection, known_arguments


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the section `sglang`."""
    return [
        Section(
            "sglang", SglangSection, foreign=ForeignFlags("server_args", known_arguments(), prefix="sglang_")
        )
    ]


@hookimpl
def slime_check_config(settings: Settings) -> Iterable[Problem]:
    """Refuse arguments and transports that are not there, and log-probs that are not of what is sampled from."""
    for name in settings.section(SglangSection).server_args:
        where = f"sglang.server_args.{name}"
        if name in DERIVED:
            yield Problem(where, "an argument that slime gives the server itself", DERIVED[name])
        elif name not in known_arguments():
            near = difflib.get_close_matches(name, known_arguments(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield Problem(where, "no argument of SGLang's server", f"one that it has{hint}")
    rollout = settings.section(RolloutSection)
    if rollout.rollout_engine != "sglang":
        return
    yield from transport_problems(settings.section(TrainSection), "engine sglang", TRANSPORTS)
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
