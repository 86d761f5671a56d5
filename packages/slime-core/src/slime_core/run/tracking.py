"""Trackers of a run: they answer hooks from its start to its end, and may add metrics, as any plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry, register
from slime_core.protocols import Metrics
from slime_core.rollout.given_metrics import given_metrics

if TYPE_CHECKING:
    from slime_core.rollout.context import RolloutRun


def attach(registry: Registry, trackers: Sequence[object]) -> None:
    """Register trackers for hooks; they are called in this order.

    Raises:
        PluginError: a method is no hook, is not marked as one, or takes what its hook does not give; or none is marked.
    """
    for number, tracker in reversed(list(enumerate(trackers))):  # who is registered last is called first
        register(registry.hook_manager, tracker, name=f"{type(tracker).__name__} (tracker {number + 1})")
        if not registry.hook_manager.get_hookcallers(tracker):
            raise PluginError(
                f"the tracker {type(tracker).__name__} answers no hook; wanted methods such as slime_step_end, marked "
                "@hookimpl (docs/plugins.md)"
            )


def detach(registry: Registry, trackers: Sequence[object]) -> None:
    """Unregister trackers; those that were never attached are ignored."""
    for tracker in trackers:
        if registry.hook_manager.is_registered(tracker):
            registry.hook_manager.unregister(tracker)


def more_metrics(run: RolloutRun, step: int, metrics: Metrics) -> Metrics:
    """Return what plugins and trackers add to the metrics of a step that is over.

    Raises:
        PluginError: one of them is no number; names the plugin.
    """
    hook = run.registry.hooks.slime_step_metrics
    answers = hook(run=run, step=step, metrics=metrics)
    called = reversed(hook.get_hookimpls())  # in the order of their answers
    names = [one.plugin_name for one in called if not (one.wrapper or one.hookwrapper)]
    if len(names) != len(answers):  # who returns None has no answer
        names = [" or ".join(names)] * len(answers)
    added: Metrics = {}
    for name, answer in zip(names, answers, strict=True):
        added |= given_metrics(answer, who=f"slime_step_metrics of {name}")
    return added
