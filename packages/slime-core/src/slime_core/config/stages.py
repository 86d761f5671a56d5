"""Stages: the runs of one recipe in a row, each from the weights that the previous one saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slime_core.config.derive import run_folder
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem

#: Table of a recipe that holds the stages' own tables.
STAGE = "stage"

#: What a stage cannot have by itself, and why.
_OF_ALL = (
    ("run", "run_name", "that of the first stage: every stage has a folder below it"),
    ("run", "output_dir", "that of the first stage: it holds the folders of all"),
    ("model", "hf_checkpoint", "that of the first stage: a later one starts from the weights before it"),
)


@dataclass(frozen=True)
class Stage:
    """One run of a recipe, and where it stands among the others."""

    name: str
    """Empty for the one run of a recipe without stages."""
    settings: Settings
    """Of the run. The model of a later stage is the folder that the one before leaves."""
    beforehand: Settings
    """The same with the model of the first stage, which has the config and tokenizer of all: for what is done before
    there is that folder."""
    leaves: Path | None = None
    """Hugging Face folder in which the next stage finds the weights; None where there is no next one."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return run_folder(self.settings)


def chain(found: Mapping[str, Settings]) -> list[Stage]:
    """Return the stages of settings by name, in their order.

    Raises:
        ConfigError: one has what only all together can have.
    """
    if list(found) == [""]:
        return [Stage("", found[""], found[""])]
    problems = list(_differences(found))
    if problems:
        raise ConfigError(problems)
    stages: list[Stage] = []
    for name, settings in found.items():
        run_name = f"{settings.run.run_name}/{name}"
        own = beforehand = settings.having("run", "run_name", run_name, origin=f"{STAGE} {name}")
        if stages:
            before = stages[-1]
            own = own.having("model", "hf_checkpoint", str(before.leaves), origin=f"{STAGE} {before.name}")
        last = len(stages) == len(found) - 1
        leaves = None if last else Path(own.run.output_dir) / run_name / "hf"
        stages.append(Stage(name, own, beforehand, leaves))
    return stages


def _differences(found: Mapping[str, Settings]) -> Iterator[Problem]:
    first, *later = found.values()
    for settings in later:
        for table, key, wanted in _OF_ALL:
            value = getattr(settings.sections[table], key)
            if value != getattr(first.sections[table], key):
                yield Problem(f"{settings.origin(table, key)}: {table}.{key}", repr(value), wanted)
