"""The hooks of slime-sglang: its sections, its checks and its versions. Imports neither torch nor sglang."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from slime_core.config.factories import trainer_factory
from slime_core.config.settings import Settings
from slime_core.errors import Problem
from slime_core.plugins.hooks import ForeignFlags, Section, hookimpl
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry
from slime_core.weights.sync import transport_problems

from slime_sglang.checks.disaggregation import (
    disaggregated_topology,
    disaggregation_problems,
    missing_for_mooncake,
)
from slime_sglang.checks.fleet import (
    external_problems,
    gpu_problems,
    health_problems,
    machine_problems,
    rank_update_problems,
    updated_server_problems,
)
from slime_sglang.checks.models import image_problems, model_problems, served_name_problems
from slime_sglang.checks.router import router_problems, router_setting
from slime_sglang.checks.stages import stage_problems
from slime_sglang.settings.section import (
    CAPABILITIES,
    OURS,
    ROUTED_EXPERTS,
    FleetSection,
    SglangSection,
    argument_problems,
    known_arguments,
    refused_arguments,
)
from slime_sglang.settings.server import planned_transport
from slime_sglang.settings.topology import problems_of

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the sections `sglang` and `fleet`."""
    return [
        Section(
            "sglang",
            SglangSection,
            foreign=ForeignFlags(
                "server_args", known_arguments(), prefix="sglang_", refused=refused_arguments()
            ),
        ),
        Section("fleet", FleetSection, prefix=""),
    ]


@hookimpl
def slime_check_config(settings: Settings, registry: Registry) -> Iterable[Problem]:
    """Refuse unknown arguments and transports, fleets that cannot work, and sampling whose log-probs SGLang does not report."""
    yield from argument_problems(settings.section(SglangSection).server_args, where="sglang.server_args")
    yield from served_name_problems(settings)
    rollout = settings.rollout
    if not means(rollout.rollout_engine, OURS):
        return
    fleet = settings.section(FleetSection)
    yield from gpu_problems(settings)
    yield from health_problems(fleet)
    if fleet.sglang_config is not None:
        yield from problems_of(settings)
    yield from disaggregation_problems(settings)
    train = settings.train
    is_updated = trainer_factory(train, registry).capabilities.learns
    transport = planned_transport(settings) if is_updated else None
    yield from external_problems(fleet, transport, registry, host=train.update_weight_host)
    yield from machine_problems(settings, transport, registry)
    yield from rank_update_problems(settings, registry)
    yield from router_problems(settings)
    if is_updated:
        yield from updated_server_problems(settings)
    yield from transport_problems(train, "engine sglang", CAPABILITIES, registry)
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
def slime_check_flags(settings: Settings) -> Iterable[Problem]:
    """Refuse settings of a watch that is not kept, and arguments of servers that the run does not start."""
    if not means(settings.rollout.rollout_engine, OURS):
        return ()
    from slime_sglang.checks.unread_flags import unread_flags  # with the checks of core

    return unread_flags(settings)


@hookimpl
def slime_check_build(build: BuildContext) -> Iterable[Problem]:
    """Refuse missing models, a folder for servers that updates do not fit, and what neither routed experts nor images pass."""
    if not means(build.settings.rollout.rollout_engine, OURS):
        return
    yield from model_problems(build)
    yield from stage_problems(build)
    yield from image_problems(build)
    fleet, folder = build.section(FleetSection), build.section(SglangSection).model_path
    is_updated = trainer_factory(build.settings.train, build.registry).capabilities.learns
    if folder is not None:
        from slime_sglang.checks.served_folder import served_problems

        yield from served_problems(build, folder, is_updated=is_updated)
    elif is_updated:
        from slime_sglang.checks.served_folder import updated_folder_problems

        yield from updated_folder_problems(build)
    if is_updated:
        from slime_sglang.checks.rotary import rotary_problems

        where = "model.hf_checkpoint" if folder is None else "sglang.model_path"
        yield from rotary_problems(build, folder or build.model_path, where=where)
    if fleet.has_router and ROUTED_EXPERTS in build.engine_needs:
        yield Problem(
            router_setting(fleet),
            "it in a run that needs the experts of each token",
            "no router",
            "sglang-router drops the request for them; without it requests are balanced all the same",
        )
    if ROUTED_EXPERTS in build.engine_needs and disaggregated_topology(build.settings) is not None:
        yield Problem(
            "fleet.prefill_num_servers" if fleet.sglang_config is None else str(fleet.sglang_config),
            "prefill and decode engines in a run that needs the experts of each token",
            "regular engines",
            "SGLang transfers the cache, but not the experts of the prompt's tokens",
        )


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of SGLang, its router, and mooncake, which transfers KV caches."""
    found = {
        "sglang": "not installed; slime-sglang needs it",
        "sglang-router": "not installed; --router-policy needs it",
    }
    for name in found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"mooncake": _mooncake()}


def _mooncake() -> str:
    missing = missing_for_mooncake()
    if missing is not None:
        return f"no {missing[0]}; --prefill-num-servers needs it: {missing[1]}"
    for name in ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{importlib.metadata.version(name)} ({name})"
    return "of a distribution unknown here"
