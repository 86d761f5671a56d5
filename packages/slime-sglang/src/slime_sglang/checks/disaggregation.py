"""Checks of prefill and decode engines: the library that transfers the KV cache, and what does not work with them."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem

from slime_sglang.checks.router import router_setting
from slime_sglang.server.disaggregation import DEFAULT_BACKENDS
from slime_sglang.settings.section import FleetSection, SglangSection
from slime_sglang.settings.topology import ServingTopology, serving_topology

#: System library that the wheels of mooncake load.
_LIBRARY = "libibverbs.so.1"
#: There are two wheels of mooncake; this says which one to install.
_INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda on a machine without a GPU, mooncake-transfer-engine on one with "
    "CUDA; or use regular engines"
)


def disaggregated_topology(settings: Settings) -> ServingTopology | None:
    """Return the topology of a run with prefill and decode engines; None for any other."""
    fleet = settings.section(FleetSection)
    try:
        topology = serving_topology(settings)
    except ConfigError:  # which another check reports
        return None
    if fleet.rollout_external_engine_addrs or not any(map(topology.is_disaggregated, topology.models)):
        return None
    return topology


def disaggregation_problems(settings: Settings) -> Iterator[Problem]:
    """Refuse prefill and decode engines without a library that transfers the KV cache, or behind a router."""
    topology = disaggregated_topology(settings)
    if topology is None:
        return
    fleet = settings.section(FleetSection)
    where = "fleet.prefill_num_servers" if fleet.sglang_config is None else str(fleet.sglang_config)
    given = settings.section(SglangSection).server_args
    placements = [
        placement
        for model in topology.models
        for placement in topology.placements(model)
        if placement.role != "regular"
    ]
    missing = [transfer_problems({**given, **placement.overrides}, where=where) for placement in placements]
    yield from next(filter(None, map(list, missing)), [])
    if fleet.has_router:
        yield Problem(
            router_setting(fleet),
            "it with prefill and decode engines",
            "no router",
            "sglang-router would pair them itself, which has not been run; without it requests are balanced all the same",
        )


def transfer_problems(arguments: Mapping[str, Any], *, where: str) -> Iterator[Problem]:
    """Yield what is missing on this machine for mooncake, unless the arguments name another transfer."""
    if arguments.get("disaggregation_transfer_backend") not in (None, *DEFAULT_BACKENDS.values()):
        return
    missing = missing_for_mooncake()
    if missing is not None:
        what, hint = missing
        yield Problem(where, f"prefill and decode engines, and no {what}", "it", hint)


def missing_for_mooncake() -> tuple[str, str] | None:
    """Return what mooncake misses on this machine, and how to get it; None where nothing is."""
    if importlib.util.find_spec("mooncake") is None:
        return "package mooncake", _INSTALL
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return (
            f"{_LIBRARY}, which mooncake loads",
            "apt-get install libibverbs1, or the package that has it on this system",
        )
    return None
