"""Trackers of a run: they answer hooks from its start to its end."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry, register


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
