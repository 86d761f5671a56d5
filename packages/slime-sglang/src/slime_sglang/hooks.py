"""Hooks of slime-sglang. Imports neither torch nor sglang."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from slime_core.config.sections import RolloutSection, TrainSection
from slime_core.config.settings import Settings
from slime_core.errors import Problem
from slime_core.plugins.hooks import ForeignFlags, Section, hookimpl
from slime_core.weights import transport_problems

from slime_sglang.section import (
    DERIVED,
    ROUTED_EXPERTS,
    TRANSPORTS,
    FleetSection,
    SglangSection,
    known_arguments,
)

if TYPE_CHECKING:
    from slime_core.build import BuildContext


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Return the sections `sglang` and `fleet`."""
    return [
        Section(
            "sglang", SglangSection, foreign=ForeignFlags("server_args", known_arguments(), prefix="sglang_")
        ),
        Section("fleet", FleetSection, prefix=""),
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
    yield from _fleet_problems(settings.section(FleetSection))
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
def slime_check_build(build: BuildContext) -> Iterable[Problem]:
    """Refuse a router where the run needs each token's experts, and a folder for servers that updates do not fit."""
    if build.section(RolloutSection).rollout_engine != "sglang":
        return
    folder = build.section(SglangSection).model_path
    if folder is not None:
        from slime_sglang.served import served_problems

        yield from served_problems(build, folder)
    fleet = build.section(FleetSection)
    if fleet.has_router and ROUTED_EXPERTS in build.engine_needs:
        yield Problem(
            "fleet.router_policy" if fleet.router_policy is not None else "fleet.sglang_router_ip",
            "it in a run that needs the experts of each token",
            "no router",
            "sglang-router drops the question for them; without it requests are spread all the same",
        )


def _fleet_problems(fleet: FleetSection) -> Iterator[Problem]:
    """Refuse sums of GPUs that do not add up, addresses that are none, and a router that is not there."""
    total, each = fleet.rollout_num_gpus, fleet.rollout_num_gpus_per_engine
    if total is not None and total % each:
        yield Problem(
            "fleet.rollout_num_gpus",
            f"{total} with rollout_num_gpus_per_engine {each}",
            f"a multiple of {each}",
            f"{total % each} would be left over",
        )
    elif each > 1:
        yield Problem(
            "fleet.rollout_num_gpus_per_engine",
            str(each),
            "1",
            "weights that arrive are proven for engines of one GPU only; give each GPU an engine of its own",
        )
    addresses = fleet.rollout_external_engine_addrs
    if addresses and total is not None:
        yield Problem(
            "fleet.rollout_num_gpus",
            f"{total} beside rollout_external_engine_addrs",
            "one of them",
            "external engines bring their own GPUs",
        )
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536 or addresses.count(address) > 1:
            yield Problem(
                "fleet.rollout_external_engine_addrs", repr(address), "host:port, each of them once"
            )
    if fleet.sglang_router_ip is not None and fleet.sglang_router_port is None:
        yield Problem("fleet.sglang_router_port", "nothing beside sglang_router_ip", "the router's port")
    if fleet.sglang_router_port is not None and not fleet.has_router:
        yield Problem(
            "fleet.sglang_router_port",
            "it without a router",
            "router_policy, which starts one, or sglang_router_ip, which joins one",
        )
    if fleet.router_policy is not None and fleet.sglang_router_ip is not None:
        yield Problem(
            "fleet.router_policy",
            "it beside sglang_router_ip",
            "one of them",
            "a joined router has its own policy",
        )
    elif fleet.router_policy is not None and importlib.util.find_spec("sglang_router") is None:
        yield Problem(
            "fleet.router_policy",
            f"{fleet.router_policy!r} and no package sglang-router",
            "it",
            "pip install 'slime-sglang[router]', or drop the policy: engines get requests without a router, too",
        )


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of SGLang and of its router."""
    found = {
        "sglang": "not installed; slime-sglang needs it",
        "sglang-router": "not installed; --router-policy needs it",
    }
    for name in found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
