"""Hooks of slime-rm: its sections of settings."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core.plugins.hooks import Section, hookimpl

from slime_rm.section import RmSection, VerifiersSection


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[rm]` and `[verifiers]`."""
    served = ("judge", "remote_rm", "reward_model", "teacher")
    return [
        Section("rm", RmSection, prefix="", read_by=served),
        Section("verifiers", VerifiersSection, read_by=["verifiers"]),
    ]
