"""What slime-megatron answers to core's hooks. Imports neither torch nor megatron."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from slime_core.config.sections import RunSection, TrainSection
from slime_core.errors import Problem
from slime_core.plugins.hooks import ForeignFlags, Section, hookimpl

from slime_megatron import foreign
from slime_megatron.foreign import known_flags
from slime_megatron.section import PARALLEL_SIZES, MegatronSection
from slime_megatron.section_roles import LoraSection, RolesSection

if TYPE_CHECKING:
    from slime_core.config.settings import Settings


@hookimpl
def slime_config_sections() -> list[Section]:
    """Return the sections `megatron`, `roles` and `lora`."""
    return [
        Section("megatron", MegatronSection, prefix="", foreign=ForeignFlags("megatron_args", known_flags())),
        Section("roles", RolesSection, prefix=""),
        Section("lora", LoraSection),
    ]


@hookimpl
def slime_check_config(settings: Settings) -> list[Problem]:
    """Return what the trainer cannot do under these settings."""
    train = settings.section(TrainSection)
    if train.train_backend not in ("megatron", "slime-megatron/megatron"):
        return []
    run, section = settings.section(RunSection), settings.section(MegatronSection)
    return [
        *_parallel_problems(run, section),
        *_schedule_problems(run, train),
        *_critic_problems(run, settings.section(RolesSection)),
        *_freezing_problems(section, settings.section(LoraSection)),
        *foreign.problems(section.megatron_args),
    ]


def _parallel_problems(run: RunSection, section: MegatronSection) -> Iterator[Problem]:
    for name in PARALLEL_SIZES:
        size = getattr(section, name) or 1
        if run.launcher == "local" and size > 1:
            yield Problem(f"megatron.{name}", str(size), "1: launcher local is one process")


def _freezing_problems(section: MegatronSection, lora: LoraSection) -> Iterator[Problem]:
    only, frozen = section.only_train_params_name_list, section.freeze_params_name_list
    if only and frozen:
        yield Problem(
            "megatron.only_train_params_name_list", "it beside freeze_params_name_list", "one of them"
        )
    if lora.rank is not None and (only or frozen):
        yield Problem(
            "lora.rank", "it beside a list of frozen parameters", "one of them: LoRA freezes all others"
        )


def _schedule_problems(run: RunSection, train: TrainSection) -> Iterator[Problem]:
    if train.min_lr > train.lr:
        yield Problem("train.min_lr", f"{train.min_lr:g}", f"at most train.lr, {train.lr:g}")
    if train.lr_decay_style == "constant":
        return
    if train.lr_decay_iters is None and run.num_rollout is None:
        yield Problem(
            "train.lr_decay_iters",
            f"nothing, with lr_decay_style {train.lr_decay_style} and no run.num_rollout",
            "the optimizer steps of the decay",
            "set it, or run.num_rollout",
        )
    elif train.lr_decay_iters is not None and train.lr_decay_iters <= train.lr_warmup_iters:
        yield Problem(
            "train.lr_decay_iters",
            str(train.lr_decay_iters),
            f"more than lr_warmup_iters, {train.lr_warmup_iters}",
        )


def _critic_problems(run: RunSection, roles: RolesSection) -> Iterator[Problem]:
    if run.num_rollout is not None and roles.num_critic_only_steps >= run.num_rollout:
        yield Problem(
            "roles.num_critic_only_steps",
            str(roles.num_critic_only_steps),
            f"less than run.num_rollout, {run.num_rollout}",
            "else the policy is never trained",
        )


@hookimpl
def slime_environment() -> Mapping[str, str]:
    """Return the versions of megatron-core and torch."""
    versions = {}
    for name in ("megatron-core", "torch"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed: the trainer megatron cannot be used"
    return versions
