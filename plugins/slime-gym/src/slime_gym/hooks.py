"""Hooks of slime-gym: its section of settings."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core.plugins.hooks import Section, hookimpl

from slime_gym.section import GymSection


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[gym]`."""
    return [Section("gym", GymSection)]
