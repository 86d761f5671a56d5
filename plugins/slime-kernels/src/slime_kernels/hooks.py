"""Hooks of slime-kernels: its sections of settings. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core.plugins.hooks import Section, hookimpl

from slime_kernels.section import KernelsSection, TurnsSection


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[kernels]` and `[kernel_turns]`."""
    return [Section("kernels", KernelsSection), Section("kernel_turns", TurnsSection, prefix="")]
