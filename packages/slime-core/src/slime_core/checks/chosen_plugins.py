"""Checks of the plugins that settings choose by name: installed, importable, callable as their group is."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from slime_core.config.base import Unset
from slime_core.config.derive import reward_group, trackers
from slime_core.config.eval_sets import eval_sets
from slime_core.config.sections import CORE_SECTIONS
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, PluginError, Problem
from slime_core.files.json_text import shown
from slime_core.plugins.bind import choose_options
from slime_core.plugins.contract import breach
from slime_core.plugins.registry import Plugin, Registry
from slime_core.rollout.user_hooks import GROUP

#: (Section, setting, group) of what one setting alone chooses. None chooses nothing.
BY_ONE = (
    ("run", "loop", "slime.loops"),
    ("run", "launcher", "slime.launchers"),
    ("model", "tokenizer", "slime.tokenizers"),
    ("model", "model_name", "slime.models"),
    ("data", "data_source_path", "slime.sources"),
    ("data", "buffer", "slime.buffers"),
    ("data", "loss_mask_type", "slime.loss_masks"),
    ("rollout", "rollout_engine", "slime.engines"),
    ("rollout", "rollout_function_path", "slime.rollouts"),
    ("rollout", "custom_generate_function_path", "slime.generators"),
    ("rollout", "dynamic_sampling_filter_path", "slime.filters"),
    ("environment", "environment", "slime.environments"),
    ("reward", "custom_reward_post_process_path", "slime.reward_transforms"),
    ("train", "train_backend", "slime.trainers"),
    ("train", "update_weight_transport", "slime.transports"),
    ("algorithm", "value_loss_type", "slime.losses"),
    ("algorithm", "custom_tis_function_path", "slime.corrections"),
    ("eval", "eval_data_source_path", "slime.sources"),
    ("eval", "eval_function_path", "slime.eval_functions"),
)


#: Settings of the section `rollout` that choose functions of the group `slime.rollout_hooks`.
ROLLOUT_HOOKS = (
    "buffer_filter_path",
    "rollout_sample_hook_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
)


@dataclass(frozen=True)
class Choice:
    """Something that is chosen by name."""

    setting: str
    """`section.key`."""
    group: str
    reference: str
    flag: str | None = None
    """The flag that chooses it, where how it is called depends on that."""


def chosen(settings: Settings, registry: Registry) -> Iterator[Choice]:
    """Yield everything that is chosen by name; what a setting without a value would choose is left out."""
    for table, field, group in BY_ONE:
        with contextlib.suppress(Unset):
            reference = getattr(settings.sections[table], field)
            if reference is not None:
                yield Choice(f"{table}.{field}", group, reference)
    with contextlib.suppress(Unset):
        for tracker in trackers(settings.run):
            yield Choice("run.tracker", "slime.trackers", tracker)
    with contextlib.suppress(Unset, ConfigError):  # what is wrong with the file is said by `input_files`
        yield from _evaluation_sets(settings, registry)
    for several in (_rewards, _algorithm, _rollout_hooks):
        with contextlib.suppress(Unset):
            yield from several(settings)
    for about in registry.groups.values():
        for flag in about.flags:
            yield from _of_plugins(settings, about.name, flag)


def _rewards(settings: Settings) -> Iterator[Choice]:
    """Yield every reward that is named, also where two settings choose for one place, which is a problem of its own."""
    reward = settings.reward
    group = reward_group(reward)
    for setting, references in (
        ("reward.rm_type", [reward.rm_type]),
        ("reward.custom_rm_path", [reward.custom_rm_path]),
        ("reward.rm_weights", reward.rm_weights),
        ("reward.rm_args_of", reward.rm_args_of),
    ):
        for reference in references:
            if reference is not None:
                yield Choice(setting, group, reference)


def _evaluation_sets(settings: Settings, registry: Registry) -> Iterator[Choice]:
    """Yield what evaluation sets choose for themselves."""
    for name, one in eval_sets(settings, registry).items():
        if one.reward is not None:
            yield Choice(f"eval.eval_config: {name}", reward_group(settings.reward), one.reward)
        if one.custom_generate_function_path is not None:
            yield Choice(f"eval.eval_config: {name}", "slime.generators", one.custom_generate_function_path)


def _algorithm(settings: Settings) -> Iterator[Choice]:
    """Yield what a setting chooses, or in its place `module:function` by another."""
    algorithm = settings.algorithm
    for field, custom, group in (
        ("advantage_estimator", "custom_advantage_function_path", "slime.advantages"),
        ("loss_type", "custom_loss_function_path", "slime.losses"),
        ("loss_reducer", "custom_pg_loss_reducer_function_path", "slime.reducers"),
    ):
        setting = custom if getattr(algorithm, custom) is not None else field
        reference = getattr(algorithm, setting)
        if reference is not None:
            yield Choice(f"algorithm.{setting}", group, reference)


def _rollout_hooks(settings: Settings) -> Iterator[Choice]:
    """Yield functions of a user's own, each with its flag, on which it depends how it is called."""
    for field in ROLLOUT_HOOKS:
        value = getattr(settings.rollout, field)
        for reference in [value] if isinstance(value, str) else value or ():
            yield Choice(f"rollout.{field}", GROUP, reference, f"--{field.replace('_', '-')}")


def _of_plugins(settings: Settings, group: str, flag: str) -> Iterator[Choice]:
    """Yield what a plugin's own setting chooses: its flag is the setting's name, with that of its section before it or without."""
    name = flag.removeprefix("--").replace("-", "_")
    for table, section in settings.sections.items():
        field = name.removeprefix(f"{table}_")
        if table not in CORE_SECTIONS and field in type(section).model_fields:
            with contextlib.suppress(Unset):
                reference = getattr(section, field)
                if reference is not None:
                    yield Choice(f"{table}.{field}", group, reference, flag)


def name_problems(settings: Settings, registry: Registry) -> Iterator[Problem]:
    """Yield what is chosen and not there, and which functions of a user's own cannot be called as they will be.

    Those are imported for that; what is installed by name is not, because that may take long. See `plugin_problems`.
    """
    broken = registry.broken_hooks
    for choice in chosen(settings, registry):
        try:
            plugin = registry.find(choice.group, choice.reference)
        except PluginError as error:
            yield Problem(_where(settings, choice), shown(choice.reference), str(error))
            continue
        if plugin.distribution in broken:
            found = f"{choice.reference!r} of {plugin.distribution}"
            yield Problem(choice.setting, found, "a plugin that imports", broken[plugin.distribution])
        elif not plugin.distribution:
            yield from _misfit(settings, choice, plugin, registry)


def plugin_problems(
    settings: Settings, registry: Registry, groups: Container[str] | None = None
) -> Iterator[Problem]:
    """Yield which of the chosen plugins do not import, or cannot be called as they will be; imports all of them.

    Args:
        settings: of the run.
        registry: the installed plugins.
        groups: those whose plugins are looked at; all when None.

    Raises:
        PluginError: one is not there, which `name_problems` tells.
    """
    for choice in chosen(settings, registry):
        if groups is not None and choice.group not in groups:
            continue
        yield from _misfit(settings, choice, registry.find(choice.group, choice.reference), registry)


def _misfit(settings: Settings, choice: Choice, plugin: Plugin, registry: Registry) -> Iterator[Problem]:
    try:
        value = registry.usable(plugin, flag=choice.flag)
    except PluginError as error:
        yield Problem(_where(settings, choice), shown(choice.reference), str(error))
        return
    if why := breach(registry.groups[choice.group], value, flag=choice.flag):
        yield Problem(_where(settings, choice), f"{shown(choice.reference)}: {why.found}", why.wanted)
    elif choice.group == "slime.environments" and registry.adapter(plugin, flag=choice.flag) is None:
        yield from _wrong_options(settings, plugin, value)


def _wrong_options(settings: Settings, plugin: Plugin, environment: Any) -> Iterator[Problem]:
    """Yield options that an environment does not accept; one is made for each sample, and would fail in the first step."""
    where, explicit = "environment.environment_args", settings.environment.environment_args
    section = {"resolve": None} | settings.section_of(plugin.distribution)
    try:
        choose_options(environment, where=where, explicit=explicit, section=section)
    except ConfigError as error:
        yield from error.problems
    except PluginError as error:
        yield Problem(where, shown(explicit), f"options of {plugin.qualified}", str(error))


def _where(settings: Settings, choice: Choice) -> str:
    table, _, field = choice.setting.partition(".")
    return f"{choice.setting} ({settings.origin(table, field)})"
