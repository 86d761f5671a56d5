"""What can be set: the sections of core and of the installed plugins, and their flags."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_origin

from pydantic.fields import FieldInfo

from slime_core.config.base import SectionModel
from slime_core.config.sections import CORE_SECTIONS
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.hooks import ForeignFlags, Section
from slime_core.plugins.registry import Registry

#: What other frameworks call it -> our flag, for the message that refuses it.
_MEANT: Mapping[str, str] = {
    "batch_size": "rollout_batch_size",
    "dataset": "prompt_data",
    "epochs": "num_epoch",
    "gpus": "actor_num_gpus_per_node",
    "num_gpus": "actor_num_gpus_per_node",
    "kl": "kl_loss_coef",
    "learning_rate": "lr",
    "max_steps": "num_rollout",
    "steps": "num_rollout",
    "max_tokens": "rollout_max_response_len",
    "model": "hf_checkpoint",
    "num_generations": "n_samples_per_prompt",
    "output": "output_dir",
    "reward": "rm_type",
    "temperature": "rollout_temperature",
    "train_data": "prompt_data",
}


@dataclass(frozen=True)
class Flag:
    """A command-line flag: one field of one section."""

    name: str
    """Flag without dashes, words joined by underscores."""
    table: str
    field: str
    info: FieldInfo

    @property
    def spelled(self) -> str:
        """The flag as it is typed."""
        return "--" + self.name.replace("_", "-")

    @property
    def default(self) -> str:
        """The default as it is shown."""
        if self.info.is_required():
            return "(required)"
        return repr(self.info.get_default(call_default_factory=True))

    @property
    def optional(self) -> bool:
        """Whether the value may be None."""
        return type(None) in getattr(self.info.annotation, "__args__", ())

    @property
    def kind(self) -> type:
        """`bool`, `list`, `dict`, or `str` for everything that is one word."""
        annotation = self.info.annotation
        options = [a for a in getattr(annotation, "__args__", ()) if a is not type(None)]
        if get_origin(annotation) not in (list, dict) and len(options) == 1:
            annotation = options[0]
        base = get_origin(annotation) or annotation
        return base if base in (bool, list, dict) else str


@dataclass(frozen=True)
class Schema:
    """All sections of core and of the installed plugins, and their flags."""

    models: Mapping[str, type[SectionModel]]
    owners: Mapping[str, str]
    flags: Mapping[str, Flag]
    foreign: Mapping[str, ForeignFlags]
    """Table -> the flags of another program that it hands through."""

    def find_foreign(self, name: str) -> tuple[str, str, str] | None:
        """Return (table, field, name without its prefix) of a flag that belongs to another program."""
        for table, flags in self.foreign.items():
            bare = name.removeprefix(flags.prefix)
            if name.startswith(flags.prefix) and bare in flags.names:
                return table, flags.field, bare
        return None

    def nearest_flag(self, word: str) -> str:
        """Return what an error says of the flag that was probably meant: one of slime's own before another program's."""
        name = word.removeprefix("--").replace("-", "_")
        if (meant := _MEANT.get(name, "")) in self.flags:
            return repr(self.flags[meant].spelled)
        theirs = [f"{flags.prefix}{bare}" for flags in self.foreign.values() for bare in flags.names]
        for names in ([*self.flags, "set"], theirs):
            if near := _close(name, names):
                return f"{'--' + near.replace('_', '-')!r} (the nearest name)"
        return "a known flag"


def build_schema(registry: Registry) -> Schema:
    """Collect the sections of core and of every plugin.

    Raises:
        ConfigError: two sections or two flags share a name; names both owners.
    """
    declared = [("slime-core", Section(name, model, prefix="")) for name, model in CORE_SECTIONS.items()]
    manager = registry.hook_manager
    for implementation in manager.hook.slime_config_sections.get_hookimpls():
        sections: Iterable[Section] = implementation.function()  # type: ignore[assignment]  # pluggy types it object
        declared += [(implementation.plugin_name, section) for section in sections]
    models: dict[str, type[SectionModel]] = {}
    owners: dict[str, str] = {}
    flags: dict[str, Flag] = {}
    foreign: dict[str, ForeignFlags] = {}
    problems: list[Problem] = []
    for owner, section in declared:
        if section.name in models:
            problems.append(
                Problem(
                    f"section [{section.name}]",
                    f"it in {owners[section.name]} and in {owner}",
                    "one owner",
                    "uninstall one",
                )
            )
            continue
        models[section.name], owners[section.name] = section.model, owner
        if section.foreign is not None:
            foreign[section.name] = section.foreign
        prefix = section.name if section.prefix is None else section.prefix
        for field, info in section.model.model_fields.items():
            flag = Flag(f"{prefix}_{field}" if prefix else field, section.name, field, info)
            if flag.name in flags:
                other = owners[flags[flag.name].table]
                problems.append(
                    Problem(flag.spelled, f"it in {other} and in {owner}", "one owner", "uninstall one")
                )
            flags[flag.name] = flag
    if problems:
        raise ConfigError(problems)
    return Schema(models, owners, flags, foreign)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what an error says of the name that was probably meant."""
    options = list(known)
    if near := _close(name, options):
        return f"{near!r} (the nearest name)"
    return f"one of {', '.join(options)}" if len(options) <= 12 else "a known name"


def _close(name: str, options: list[str]) -> str | None:
    """Return the option that `name` may be a misspelling of: three letters in four are the same."""
    return next(iter(difflib.get_close_matches(name, options, n=1, cutoff=0.75)), None)
