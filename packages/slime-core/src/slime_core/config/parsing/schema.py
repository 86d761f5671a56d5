"""What can be set: the sections of core and of the installed plugins, and their flags."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from slime_core.config.base import SectionModel
from slime_core.config.parsing.words import annotation_of, wanted
from slime_core.config.sections import CORE_SECTIONS
from slime_core.errors import ConfigError, Problem
from slime_core.plugins import index
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
#: What other frameworks have a flag for, and slime takes from index.
_OTHERWISE: Mapping[str, str] = {
    "wandb_key": "the key by `wandb login`, or in the variable WANDB_API_KEY",
    "wandb_api_key": "the key by `wandb login`, or in the variable WANDB_API_KEY",
    "hf_token": "the token in the variable HF_TOKEN",
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
        value = self.info.get_default(call_default_factory=True)
        return repr(str(value) if isinstance(value, Path) else value)

    @property
    def annotation(self) -> Any:
        """The type, with its bounds."""
        return annotation_of(self.info)

    @property
    def takes(self) -> str:
        """The values that it takes, as it is shown."""
        return wanted(self.annotation)

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone means true."""
        return bool in (self.info.annotation, *getattr(self.info.annotation, "__args__", ()))


@dataclass(frozen=True)
class Schema:
    """All sections of core and of the installed plugins, and their flags."""

    models: Mapping[str, type[SectionModel]]
    owners: Mapping[str, str]
    flags: Mapping[str, Flag]
    foreign: Mapping[str, ForeignFlags]
    """Table -> the flags of another program that it hands through."""

    def flag_of(self, table: str, field: str) -> Flag:
        """Return the flag of a field."""
        return next(flag for flag in self.flags.values() if (flag.table, flag.field) == (table, field))

    def find_foreign(self, name: str) -> tuple[str, str, str] | None:
        """Return (table, field, name without its prefix) of a flag that belongs to another program."""
        for table, flags in self.foreign.items():
            bare = name.removeprefix(flags.prefix)
            if name.startswith(flags.prefix) and bare in flags.names:
                return table, flags.field, bare
        return None

    def meant_by(self, word: str) -> tuple[str, Flag | None]:
        """Return what an error says of a flag that is none, and the flag of slime's own that was probably meant.

        What another framework calls it comes first, then flags that a package would bring that is not installed, then
        misspellings: of slime's own flags, and of those of another program that would not be refused.
        """
        name = word.removeprefix("--").replace("-", "_")
        if name in _OTHERWISE:
            return _OTHERWISE[name], None
        if (meant := _MEANT.get(name, "")) in self.flags:
            return repr(self.flags[meant].spelled), self.flags[meant]
        home = index.home_of_flag(name, name.removeprefix("no_"))
        if home is not None and home not in self.owners.values():
            return f"{home}, which brings it; install it", None
        if near := closest(name, [*self.flags, "set"]):
            return f"{'--' + near.replace('_', '-')!r} (the nearest name)", self.flags.get(near)
        theirs = [f"{flags.prefix}{bare}" for flags in self.foreign.values() for bare in flags.followed]
        if near := closest(name, theirs):
            return f"{'--' + near.replace('_', '-')!r} (the nearest name)", None
        return "a known flag", None


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
    if near := closest(name, options):
        return f"{near!r} (the nearest name)"
    return f"one of {', '.join(options)}" if len(options) <= 12 else "a known name"


def closest(name: str, options: Iterable[str]) -> str | None:
    """Return the option that `name` may be a misspelling of: three letters in four are the same."""
    if len(name) > 100:  # a misspelling is short, and the search takes the square of it
        return None
    return next(iter(difflib.get_close_matches(name, list(options), n=1, cutoff=0.75)), None)
