"""Flags that would do nothing: nothing that is chosen reads them. A recipe may hold such settings, for runs of several kinds."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import importlib_metadata

from slime_core.checks.chosen_plugins import BY_ONE, Choice, chosen
from slime_core.config.derive import FULLY_ASYNC, ONE_STEP_OFF, SYNC
from slime_core.config.settings import Settings
from slime_core.errors import PluginError, Problem
from slime_core.plugins.hooks import Section
from slime_core.plugins.registry import Plugin, Registry, normal_name
from slime_core.weights.sync import wanted_transport

#: Group -> the flag that chooses its plugins for training, for messages.
_FLAGS = {
    **{group: f"--{field.replace('_', '-')}" for _, field, group in reversed(BY_ONE)},
    "slime.rewards": "--rm-type",
    "slime.rollout_hooks": "--rollout-sample-hook-path",
    "slime.trackers": "--tracker",
}
#: Groups of rewards, which rows and evaluation sets may choose, too.
_REWARDS = ("slime.rewards", "slime.group_rewards")
#: Groups whose functions see the run, or its settings.
_WITH_SETTINGS = (
    "slime.eval_functions",
    "slime.loops",
    "slime.rollout_hooks",
    "slime.rollouts",
    "slime.sources",
)


def unread_flags(stages: Sequence[Settings], registry: Registry) -> Iterator[Problem]:
    """Yield the flags of plugins' sections that are read in none of a recipe's stages for which they were given.

    Plugins tell of more by the hook `slime_check_flags`.
    """
    told = [{p.where: p for p in _of_one_run(settings, registry)} for settings in stages]
    typed = [{".".join(key) for key in _typed(settings)} for settings in stages]
    for where, problem in {where: p for problems in told for where, p in problems.items()}.items():
        if all(where in told[i] for i, flags in enumerate(typed) if where in flags):
            yield problem


def _typed(settings: Settings) -> list[tuple[str, str]]:
    """Return (table, field) of what flags gave."""
    return [key for key, origin in settings.origins.items() if origin.startswith("--")]


def _of_one_run(settings: Settings, registry: Registry) -> Iterator[Problem]:
    if not (typed := _typed(settings)):
        return
    try:
        plugins = {
            registry.find(choice.group, choice.reference): choice for choice in chosen(settings, registry)
        }
        elsewhere = _read_elsewhere(plugins, registry)
    except PluginError:  # which is told by itself, and may be what would read them
        return
    if elsewhere is None:
        return
    for problem in _unread(settings, registry, plugins, typed):
        table, _, field = problem.where.partition(".")
        if field not in elsewhere and f"{table}_{field}" not in elsewhere:
            yield problem


def _read_elsewhere(plugins: Mapping[Plugin, Choice], registry: Registry) -> frozenset[str] | None:
    """Return names of settings that functions of a user's own may read which are handed all of them; None where it may be any.

    One that was written for another system is handed all; of some it is known what they can read (`Adapter.reads`).
    """
    read: frozenset[str] = frozenset()
    for plugin, choice in plugins.items():
        if _sees_all(plugin):
            return None
        if (adapter := registry.adapter(plugin, flag=choice.flag)) is not None:
            if adapter.reads is None:
                return None
            read |= adapter.reads
    return read


def _unread(
    settings: Settings, registry: Registry, plugins: Mapping[Plugin, Choice], typed: Sequence[tuple[str, str]]
) -> Iterator[Problem]:
    """Yield the flags that no plugin reads by its options.

    Args:
        settings: of a run.
        registry: the installed plugins.
        plugins: those that are chosen.
        typed: (table, field) of what flags gave.
    """
    yield from _of_core(settings, plugins)
    sections = {s.name: s for added in registry.hooks.slime_config_sections() for s in added}
    for table, field in typed:
        section = sections.get(table)
        if section is None or section.read_by is None:
            continue
        readers = [
            p for p in registry.plugins() if p.distribution == settings.owners[table] and _reads(p, section)
        ]
        if any(plugin.group in _REWARDS for plugin in readers):
            continue  # a row may choose it
        if readers and not any(_may_be_one(plugin, readers) for plugin in plugins):
            yield Problem(
                f"{table}.{field}",
                f"{settings.origin(table, field)}, which nothing reads here",
                f"{_choices(readers)}, or not this flag",
            )
    for problems in registry.hooks.slime_check_flags(settings=settings, registry=registry):
        yield from problems


def unread_without(
    settings: Settings, table: str, fields: Iterable[str], *, wanted: str
) -> Iterator[Problem]:
    """Yield the flags among some settings that say something else than the defaults; nothing reads them without `wanted`."""
    section = settings.sections[table]
    for field in fields:
        origin, default = settings.origin(table, field), type(section).model_fields[field].get_default()
        if origin.startswith("--") and getattr(section, field) != default:
            yield Problem(
                f"{table}.{field}", f"{origin}, which nothing reads here", f"{wanted}, or not this flag"
            )


def _of_core(settings: Settings, plugins: Iterable[Plugin]) -> Iterator[Problem]:
    """Yield flags of core's own sections that are read only beside other settings."""
    rollout, train, data = settings.rollout, settings.train, settings.data
    generators = [plugin for plugin in plugins if plugin.group == "slime.generators"]
    sources = [plugin for plugin in plugins if plugin.group == "slime.sources"]
    loop = {plugin.qualified for plugin in plugins if plugin.group == "slime.loops"}
    rollouts = {plugin.qualified for plugin in plugins if plugin.group == "slime.rollouts"}
    generates = not rollouts & {"slime-core/sft", "slime-core/recorded"}
    renders_none = bool(rollouts) and rollouts <= {"slime-core/default", "slime-core/recorded"}
    updates_in_flight = not loop & {SYNC, ONE_STEP_OFF, "slime-core/rollout-only"}
    for is_read, table, fields, wanted in (
        (
            any(one.qualified == "slime-core/multi-turn" or not one.distribution for one in generators),
            "environment",
            [field for field in type(settings.environment).model_fields if field != "environment"],
            "--custom-generate-function-path multi-turn",
        ),
        (
            generates,
            "rollout",
            ["dynamic_sampling_filter_path", "partial_rollout"],
            "--rollout-function-path default",
        ),
        (
            # The loop that takes prompts one by one counts by it what a filter dropped.
            generates and (loop != {FULLY_ASYNC} or rollout.dynamic_sampling_filter_path is not None),
            "rollout",
            ["over_sampling_batch_size"],
            "--rollout-function-path default, and in the loop fully-async --dynamic-sampling-filter-path",
        ),
        (not renders_none, "data", ["loss_mask_type"], "--rollout-function-path sft"),
        (
            bool(data.multimodal_keys) or settings.eval.eval_config is not None,
            "data",
            ["media_root"],
            "--multimodal-keys",
        ),
        (
            # Evaluation sets, the rollout sft, and generators and sources of others have their own ways to render.
            data.apply_chat_template
            or settings.eval.eval_config is not None
            or not renders_none
            or any(plugin.distribution != "slime-core" for plugin in [*generators, *sources]),
            "data",
            ["apply_chat_template_kwargs"],
            "--apply-chat-template",
        ),
        (updates_in_flight, "rollout", ["max_staleness_policy"], "--loop fully-async"),
        (updates_in_flight, "train", ["update_weights_in_flight"], "--loop fully-async"),
        (
            # Without partial rollouts a sample of this loop is as old as its weights, of which each step may have other ones.
            loop != {SYNC} or rollout.partial_rollout or train.update_weights_interval > 1,
            "rollout",
            ["max_staleness"],
            "--loop fully-async, or --partial-rollout",
        ),
        (settings.eval.eval_interval is not None, "eval", ["skip_eval_before_train"], "--eval-interval"),
        (
            # It masks what a response has when it is cut: at the end of a step, or by an update.
            rollout.partial_rollout
            and (loop != {FULLY_ASYNC} or train.update_weights_in_flight == "continue"),
            "rollout",
            ["mask_offpolicy_in_partial_rollout"],
            "--partial-rollout, and in the loop fully-async --update-weights-in-flight continue",
        ),
        (
            (wanted_transport(train) or "").startswith("disk"),  # by which none goes that is not asked for
            "train",
            ["update_weight_disk_keep_files"],
            "--update-weight-transport disk",
        ),
        (
            (wanted_transport(train) or "").endswith("-delta"),
            "train",
            ["update_weight_delta_encoding"],
            "--update-weight-mode delta",
        ),
        (
            train.lr_decay_style != "constant",
            "train",
            ["min_lr", "lr_decay_iters"],
            "--lr-decay-style linear or cosine",
        ),
        (
            settings.reward.overlong_buffer_len is not None,
            "reward",
            ["overlong_penalty_factor"],
            "--overlong-buffer-len",
        ),
        (
            not settings.algorithm.disable_grpo_std_normalization,
            "algorithm",
            ["std_ddof", "std_eps", "std_over_batch"],
            "--no-disable-grpo-std-normalization",
        ),
        (
            settings.algorithm.custom_tis_function_path is not None,
            "algorithm",
            ["tis_args"],
            "--custom-tis-function-path",
        ),
    ):
        if not is_read:
            yield from unread_without(settings, table, fields, wanted=wanted)


def _sees_all(plugin: Plugin) -> bool:
    """Say whether a plugin is a user's own function that is handed all settings, by the run or as such."""
    return not plugin.distribution and plugin.group in _WITH_SETTINGS


def _reads(plugin: Plugin, section: Section) -> bool:
    return not section.read_by or plugin.name in section.read_by


def _may_be_one(plugin: Plugin, readers: Sequence[Plugin]) -> bool:
    """Say whether a plugin is one of the readers, or may be made of one: a user's own, or of a distribution that requires theirs."""
    if plugin in readers:
        return True
    if plugin.group not in {reader.group for reader in readers}:
        return False
    return not plugin.distribution or normal_name(readers[0].distribution) in _required_by(
        plugin.distribution
    )


@functools.cache
def _required_by(distribution: str) -> frozenset[str]:
    """Return the names of the distributions that an installed one requires."""
    try:
        required = importlib_metadata.requires(distribution) or []
    except importlib_metadata.PackageNotFoundError:
        return frozenset()
    names = (re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in required)
    return frozenset(map(normal_name, names))


def _choices(plugins: Sequence[Plugin]) -> str:
    """Return the flags that choose the plugins, each with their names."""
    by_flag: dict[str, list[str]] = {}
    for plugin in plugins:
        if plugin.group in _FLAGS:
            by_flag.setdefault(_FLAGS[plugin.group], []).append(plugin.name)
    told = ", ".join(f"{flag} {' or '.join(names)}" for flag, names in by_flag.items())
    return told or f"something of {plugins[0].distribution}"
