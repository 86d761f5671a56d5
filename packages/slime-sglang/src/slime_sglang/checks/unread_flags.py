"""Flags of servers that are read only where the run watches them, or starts them."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.checks.unread_flags import unread_without
from slime_core.config.settings import Settings
from slime_core.errors import Problem

from slime_sglang.settings.section import FleetSection

#: Settings of the watch over engines.
_OF_WATCH = (
    "rollout_health_check_interval",
    "rollout_health_check_timeout",
    "rollout_health_check_first_wait",
    "rollout_engine_restarts",
)


def unread_flags(settings: Settings) -> Iterator[Problem]:
    """Yield the flags that nothing reads, where this engine is chosen."""
    fleet = settings.section(FleetSection)
    if not fleet.use_fault_tolerance:
        yield from unread_without(settings, "fleet", _OF_WATCH, wanted="--use-fault-tolerance")
    if fleet.rollout_external_engine_addrs:
        wanted = "no --rollout-external-engine-addrs: external servers have arguments and GPUs of their own"
        yield from unread_without(settings, "fleet", ["rollout_num_gpus_per_engine"], wanted=wanted)
        yield from unread_without(settings, "sglang", ["server_args"], wanted=wanted)
