"""Checks of what core's loops that generate while they train ask of other settings."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.derive import FULLY_ASYNC, ONE_STEP_OFF
from slime_core.config.settings import Settings
from slime_core.errors import PluginError, Problem
from slime_core.plugins.registry import Registry
from slime_core.rollout.rollouts.default import rollout


def loop_problems(settings: Settings, registry: Registry) -> Iterator[Problem]:
    """Yield what would stop one of these loops at its first step. Loops of others are asked then (`run.generating`)."""
    try:
        loop = registry.find("slime.loops", settings.run.loop).qualified
        is_ours = registry.resolve("slime.rollouts", settings.rollout.rollout_function_path) is rollout
    except PluginError:  # which is said already
        return
    if loop in (ONE_STEP_OFF, FULLY_ASYNC):
        yield from shared_devices(settings)
    if loop == ONE_STEP_OFF:
        yield from too_young(settings)
    elif loop == FULLY_ASYNC and not is_ours:
        yield other_rollout(settings)


def shared_devices(settings: Settings) -> Iterator[Problem]:
    """Yield that trainer and engine have no devices of their own, as a loop needs that generates while it trains."""
    if settings.cluster.shares_devices:
        wanted = f"devices of their own: the loop {settings.run.loop} generates while it trains"
        yield Problem("cluster.colocate", "trainer and engine that share devices", wanted)


def too_young(settings: Settings) -> Iterator[Problem]:
    """Yield that samples which are generated a step ahead would be older than `max_staleness`."""
    interval, bound = settings.train.update_weights_interval, settings.rollout.max_staleness
    if bound is not None and bound < interval:
        wanted = f"at least {interval}: groups are generated a step ahead, with weights sent every {interval} steps"
        yield Problem("rollout.max_staleness", str(bound), wanted)


def other_rollout(settings: Settings) -> Problem:
    """Return that the rollout function is not the dispatcher's."""
    found = settings.rollout.rollout_function_path
    return Problem(
        "rollout.rollout_function_path",
        found,
        "default: only the dispatcher generates through weight updates",
    )
