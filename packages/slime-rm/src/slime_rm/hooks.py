"""Hooks of slime-rm: its sections of settings."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core.plugins.hooks import Section, hookimpl

from slime_rm.section import RmSection, VerifiersSection


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[rm]` and `[verifiers]`."""
    return [Section("rm", RmSection, prefix=""), Section("verifiers", VerifiersSection)]
