"""Hooks: what every installed plugin may implement, and the events of a run that trackers get.

A plugin lists its hook module in the entry-point group `slime`. Such a module must import in milliseconds and without its
package's heavy stack: all of them are imported by every `slime` command that reads settings. A tracker is an object whose
methods answer hooks: it is registered when its run starts, and leaves when the run is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.plugins.hooks import Section, hookspec

if TYPE_CHECKING:
    from slime_core.config.build import BuildContext
    from slime_core.config.parsing.translation import Translation
    from slime_core.config.settings import Settings
    from slime_core.errors import Problem
    from slime_core.plugins.adapter import Adapter
    from slime_core.plugins.registry import Registry
    from slime_core.run.run import Run
    from slime_core.samples import Group


@hookspec
def slime_config_sections() -> Iterable[Section]:  # type: ignore[empty-body]  # a hook specification has no body
    """Return the sections that this plugin adds."""


@hookspec(firstresult=True)
def slime_translate(words: Sequence[str], registry: Registry) -> Translation | None:
    """Return what a command line means that was written for another program; None if it is none that you know."""


@hookspec
def slime_check_config(settings: Settings, registry: Registry) -> Iterable[Problem]:  # type: ignore[empty-body]  # as above
    """Return what is wrong across settings. Must not change anything."""


@hookspec
def slime_check_flags(settings: Settings, registry: Registry) -> Iterable[Problem]:  # type: ignore[empty-body]  # as above
    """Return which flags of your sections would do nothing with what is chosen (their `Settings.origin` begins with `--`), where that
    is not told by who is chosen at all (`Section.read_by`). May import what is chosen, if there is such a flag. Not asked beside
    functions that were written for another system, which are handed all settings, unless it is known what they can read
    (`Adapter.reads`)."""


@hookspec
def slime_check_build(build: BuildContext) -> Iterable[Problem]:  # type: ignore[empty-body]  # as above
    """Return what settings ask of the model's folder that it does not allow. Asked before anything is built; must not
    change anything."""


@hookspec
def slime_placement(build: BuildContext) -> Iterable[str]:  # type: ignore[empty-body]  # as above
    """Return who is on which machine and GPUs, a line each, where the run is started by your launcher; for `check`."""


@hookspec(firstresult=True)
def slime_adapt_plugin(group: str, flag: str | None, reference: str, value: Any) -> Adapter | None:
    """Return what calls a user's own function, `value`, as its group is called, if it was written for a system that you know;
    None if it was not. It was chosen by `reference`, `module:attribute`, and by `flag` where a group's flags call otherwise."""


@hookspec(firstresult=True)
def slime_read_file(path: Path) -> Any:
    """Return what a file of settings holds, tables as dicts, if it is of a kind that you read; None if it is not."""


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
def slime_progress(run: Run, step: int, phase: str, done: int, total: int) -> None:
    """`done` of `total` units of a phase (`rollout`, `train`, `sync`, `eval`, `save`) are done; before the first step it is 0."""


@hookspec
def slime_rollout_end(run: Run, step: int, groups: Sequence[Group]) -> None:
    """The groups of a step are generated and scored, and are about to be laid out for the trainer. Steps count from 1."""


@hookspec
def slime_step_metrics(run: Run, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:  # type: ignore[empty-body]  # as above
    """Return more metrics of a step that is over, made of those that are known; trackers are told both."""


@hookspec
def slime_step_end(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """A step is over and its metrics are known. Steps count from 1; step 0 is the evaluation before the first, and an
    evaluation after a loop that stopped early has the number of the last step again."""


@hookspec
def slime_run_end(run: Run, summary: Mapping[str, Any]) -> None:
    """The run is over."""
