"""Hooks of slime-kernels: its sections of settings. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core.config.derive import choices
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.plugins.hooks import Section, hookimpl
from slime_core.plugins.registry import Registry

from slime_kernels.section import KernelsSection, TurnsSection
from slime_kernels.timing.gpus import devices_for

#: Processes of an evaluation where no GPU is, one after the other: facts of the problem, compiling, inputs, trials, the module's answers, cost.
N_PROCESSES = 6


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[kernels]` and `[kernel_turns]`."""
    return [Section("kernels", KernelsSection), Section("kernel_turns", TurnsSection, prefix="")]


@hookimpl
def slime_check_config(settings: Settings, registry: Registry) -> Iterable[Problem]:
    """Refuse to launch kernels on a GPU where there is none, and a deadline of the reward `kernels` that is shorter than evaluations."""
    section = settings.section(KernelsSection)
    needed, given = N_PROCESSES * section.eval_timeout_s, settings.reward.reward_timeout_s
    if given < needed and _is_rewarded(settings, registry):
        yield Problem(
            "reward.reward_timeout_s",
            f"{given:g} with kernels.eval_timeout_s = {section.eval_timeout_s:g}",
            f"{needed:g} or more: an evaluation has {N_PROCESSES} processes, each with that deadline",
            f"give --reward-timeout-s {needed:g}, or a smaller --kernels-eval-timeout-s",
        )
    if section.device == "cuda" and section.service is None:
        try:
            devices_for(section.device)
        except ConfigError as error:
            yield from error.problems


def _is_rewarded(settings: Settings, registry: Registry) -> bool:
    """Return whether a reward of the run is `kernels`."""
    try:
        picked = choices(settings)
        found = [registry.find(picked.reward_group, reference) for reference in picked.rewards]
    except (ConfigError, PluginError):  # core says so
        return False
    return any((one.distribution, one.name) == ("slime-kernels", "kernels") for one in found)
