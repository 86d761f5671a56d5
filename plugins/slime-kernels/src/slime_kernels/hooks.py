"""Hooks of slime-kernels: its sections of settings. Imports neither torch nor triton."""

from __future__ import annotations

import math
from collections.abc import Iterable

from slime_core.config.derive import FILE_SOURCE, choices
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.plugins.hooks import Section, hookimpl
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry

from slime_kernels.section import KernelsSection, TurnsSection
from slime_kernels.timing.gpus import devices_for
from slime_kernels.timing.measure import MODULE_S

#: Processes of an evaluation with the deadline of `kernels.eval_timeout_s`, one after the other: facts of the problem, compiling, inputs,
#: trials, the module's answers, and the cost, or the time on a GPU.
N_PROCESSES = 6
#: Those that a GPU adds, with the deadline `MODULE_S`: times of the module, as it is and by torch.compile, and its answers at full size.
N_OF_MODULE = 3

_OF_BOTH = ("levels", "prompt_template")
#: Data source -> the settings that it reads.
_READ = {
    "slime-kernels/kernelbench": (*_OF_BOTH, "problems", "eval_problems"),
    "slime-kernels/kernel-problems": (*_OF_BOTH, "families", "size", "eval_size", "seed", "answer"),
}


@hookimpl
def slime_config_sections() -> Iterable[Section]:
    """Add `[kernels]` and `[kernel_turns]`."""
    turns = Section("kernel_turns", TurnsSection, prefix="", read_by=["kernel-turns"])
    return [Section("kernels", KernelsSection), turns]


@hookimpl
def slime_check_flags(settings: Settings) -> Iterable[Problem]:
    """Refuse flags of problems that are not of the chosen sources; one of somebody else may be made of ours, and read any."""
    from slime_core.checks.unread_flags import unread_without

    given = (settings.data.data_source_path, settings.eval.eval_data_source_path or "file")
    if not all(means(source, *_READ, FILE_SOURCE) for source in given):
        return
    for field in dict.fromkeys(field for fields in _READ.values() for field in fields):
        readers = [source for source, fields in _READ.items() if field in fields]
        if not any(means(source, *readers) for source in given):
            names = " or ".join(source.partition("/")[2] for source in readers)
            yield from unread_without(settings, "kernels", [field], wanted=f"--data-source-path {names}")


@hookimpl
def slime_check_config(settings: Settings, registry: Registry) -> Iterable[Problem]:
    """Refuse to launch kernels on a GPU where there is none, and a deadline of the reward `kernels` that is shorter than evaluations."""
    section, given = settings.section(KernelsSection), settings.reward.reward_timeout_s
    rewarded, is_here = _is_rewarded(settings, registry), section.service is None
    n_gpus = 0
    # Drivers are asked by a process, which takes seconds: only where the answer matters.
    if is_here and (section.device == "cuda" or (rewarded and given < _needed(section, n_gpus=1)[0])):
        try:
            devices = devices_for(section.device)
            n_gpus = 0 if devices is None else len(devices.gpus)
        except ConfigError as error:
            yield from error.problems
    if rewarded:
        yield from check_deadline(given, section, n_gpus=n_gpus)


def check_deadline(given: float, section: KernelsSection, *, n_gpus: int) -> Iterable[Problem]:
    """Yield what is wrong with a deadline of the reward `kernels`.

    Args:
        given: `reward_timeout_s`.
        section: how candidates are evaluated.
        n_gpus: that they are launched and timed on, in turn; 0 where they are interpreted.
    """
    needed, why = _needed(section, n_gpus=n_gpus)
    if given < needed:
        yield Problem(
            "reward.reward_timeout_s",
            f"{given:g} with kernels.eval_timeout_s = {section.eval_timeout_s:g}",
            f"{needed:g} or more: {why}",
            f"give --reward-timeout-s {needed:g}, or a smaller --kernels-eval-timeout-s",
        )


def _needed(section: KernelsSection, *, n_gpus: int) -> tuple[float, str]:
    """Return the least deadline that an evaluation can keep, seconds, and what it consists of.

    On a GPU an evaluation also waits until the others have timed there, each of which may be the first of its problem.
    """
    each, needed = section.eval_timeout_s, N_PROCESSES * section.eval_timeout_s
    if not n_gpus:
        return needed, f"an evaluation has {N_PROCESSES} processes, each with that deadline"
    alone, others = each + N_OF_MODULE * MODULE_S, math.ceil(section.concurrency / n_gpus) - 1
    return needed + N_OF_MODULE * MODULE_S + others * alone, (
        f"an evaluation on a GPU has {N_PROCESSES} processes with that deadline and {N_OF_MODULE} of {MODULE_S:g} s that run the module, and "
        f"waits while {others} others of kernels.concurrency = {section.concurrency} have the GPU, each for {alone:g} s"
    )


def _is_rewarded(settings: Settings, registry: Registry) -> bool:
    """Return whether a reward of the run is `kernels`."""
    try:
        picked = choices(settings)
        found = [registry.find(picked.reward_group, reference) for reference in picked.rewards]
    except (ConfigError, PluginError):  # core says so
        return False
    return any((one.distribution, one.name) == ("slime-kernels", "kernels") for one in found)
