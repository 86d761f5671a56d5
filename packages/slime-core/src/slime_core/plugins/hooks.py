"""Hooks: what every installed plugin may answer. A plugin lists its hook module in the entry-point group `slime`.

A hook module must import in milliseconds and without its package's heavy stack: all of them are imported by
every `slime` command that reads settings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from slime_core.build import BuildContext
    from slime_core.config.settings import Settings
    from slime_core.errors import Problem
    from slime_core.run import Run
    from slime_core.sample import Group

hookspec = pluggy.HookspecMarker("slime")
#: Marks a function of a plugin's hook module as its answer to the hook of the same name.
hookimpl = pluggy.HookimplMarker("slime")


@dataclass(frozen=True)
class ForeignFlags:
    """Flags of a program that a plugin drives, taken by name as if they were fields of a section."""

    field: str
    """Field of the section, `dict[str, Any]`, that holds those given: name -> text, list of texts, or True."""
    names: Collection[str]
    """Their names, dashes as underscores."""
    prefix: str = ""
    """Put before each name to make its flag: `sglang_`. A flag of slime's own that is spelled alike comes first."""
    refused: Collection[str] = ()
    """Those that the plugin's checks refuse whatever the value: known, and never proposed for a misspelling."""

    @property
    def followed(self) -> list[str]:
        """The names that may be proposed."""
        return [name for name in self.names if name not in self.refused]


@dataclass(frozen=True)
class Section:
    """A table of settings that a plugin adds to recipes and flags."""

    name: str
    """Name of the TOML table."""
    model: type[Any]
    """Frozen pydantic model; the docstring below each field is its help text."""
    prefix: str | None = None
    """Put before each field's name to make its flag. None means the section's name; "" leaves the field's name
    alone, for words that the whole field uses."""
    foreign: ForeignFlags | None = None
    """Flags of another program that this section hands through."""


@hookspec
def slime_config_sections() -> Iterable[Section]:  # type: ignore[empty-body]  # a hook specification has no body
    """Return the sections that this plugin adds."""


@hookspec
def slime_check_config(settings: Settings) -> Iterable[Problem]:  # type: ignore[empty-body]  # as above
    """Return what is wrong across settings. Must not change anything."""


@hookspec
def slime_check_build(build: BuildContext) -> Iterable[Problem]:  # type: ignore[empty-body]  # as above
    """Return what settings ask of the model's folder that it does not allow. Asked before anything is built; must not
    change anything."""


@hookspec
def slime_engine_needs(settings: Settings) -> Iterable[str]:  # type: ignore[empty-body]  # as above
    """Return what this plugin's part of the run needs of the engine's completions and not every engine offers: names of
    `Completion.metadata`, for example `routed_experts`."""


@hookspec
def slime_environment() -> Mapping[str, str]:  # type: ignore[empty-body]  # as above
    """Return the versions of what this plugin needs (name -> version, or why it cannot be used), for `doctor`."""


@hookspec(firstresult=True)
def slime_resolve_model(name: str) -> Path | None:
    """Return a local Hugging Face folder for a model's name, fetching it if need be; None if it is not yours."""


@hookspec
def slime_list_models() -> Iterable[tuple[str, str]]:  # type: ignore[empty-body]  # as above
    """Return (name, one-line description) of the models that this plugin can fetch."""


@hookspec
def slime_run_start(run: Run) -> None:
    """The run is assembled; its first step is about to begin."""


@hookspec
def slime_rollout_end(run: Run, step: int, groups: Sequence[Group]) -> None:
    """The groups of a step are generated and scored, and are about to be laid out for the trainer. Steps count from 1."""


@hookspec
def slime_step_end(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """A step is over and its metrics are known. Steps count from 1."""


@hookspec
def slime_run_end(run: Run, summary: Mapping[str, Any]) -> None:
    """The run is over."""
