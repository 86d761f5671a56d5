"""Hooks of slime-kernels: its sections of settings. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.hooks import Section, hookimpl
from slime_core.plugins.registry import Registry

from slime_kernels.section import KernelsSection, TurnsSection
from slime_kernels.timing.gpus import devices_for


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[kernels]` and `[kernel_turns]`."""
    return [Section("kernels", KernelsSection), Section("kernel_turns", TurnsSection, prefix="")]


@hookimpl
def slime_check_config(settings: Settings, registry: Registry) -> Iterable[Problem]:
    """Refuse to launch kernels on a GPU where there is none."""
    section = settings.section(KernelsSection)
    if section.device == "cuda" and section.service is None:
        try:
            devices_for(section.device)
        except ConfigError as error:
            yield from error.problems
