"""Training in stages: the runs of a recipe in a row, and the summary of all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slime_core.config.stages import Stage
from slime_core.config.user_factories import naming
from slime_core.errors import CheckpointError, ConfigError, Interrupted, SlimeError
from slime_core.launch.local import completed, drive
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_build
from slime_core.run.run import Run
from slime_core.rundir.claim import emptied_inputs
from slime_core.rundir.rundir import RunDir


def train_stages(stages: Sequence[Stage], registry: Registry) -> dict[str, Any]:
    """Run the stages one after the other, each by its own launcher; returns the summary of all.

    `summary.json` in the folder above theirs holds it too. A stage that was completed before is left as it is, and one that
    was not goes on from its newest checkpoint.

    Raises:
        SlimeError: a stage could not be started, or failed; `summary.json` then says `failed`.
    """
    for stage in stages:
        try:
            make_build(stage.beforehand, registry)  # refuses what would else be seen when the stage begins
        except SlimeError as error:
            error.add_note(f"in stage {stage.name}")
            raise
    folders = [stage.folder for stage in stages]
    problems = {
        problem: None
        for stage in stages
        if stage.settings.run.overwrite
        for problem in emptied_inputs(stage.beforehand, folders)
    }
    if problems:
        raise ConfigError(list(problems))
    for folder in folders:
        if folder.exists():
            _take(folder, anew=False)
    for i, stage in enumerate(stages):
        launch = registry.resolve("slime.launchers", stage.settings.run.launcher)
        with naming(registry, "slime.launchers", stage.settings.run.launcher, where="run.launcher"):
            launch(stage.settings, registry, partial(_drive, stages=stages, position=i))
    return _summarize(stages, {"status": "completed"})


async def _drive(run: Run, *, stages: Sequence[Stage], position: int) -> dict[str, Any]:
    """Drive the run of a stage, unless later ones began from weights that it would still change."""
    stage, later = stages[position], [other.folder for other in stages[position + 1 :]]
    if run.settings.run.overwrite:
        for folder in later:
            if folder.exists():
                _take(folder, anew=True)
    begun = [folder for folder in later if RunDir(folder).config.exists()]
    if begun and not completed(run):
        raise CheckpointError(
            f"{begun[0]}: found the run of a later stage, and stage {stage.name} has not taken all of its "
            f"{run.num_steps} steps; wanted stages that begin from the weights of a stage that is done: remove "
            f"{begun[0]}, choose another --run-name, or start anew with --overwrite"
        )
    try:
        return await drive(run, stage.leaves)
    except BaseException as error:
        if run.is_recorded:
            status = "interrupted" if isinstance(error, Interrupted) else "failed"
            _summarize(stages, {"status": status, "error": f"{type(error).__name__}: {error}"})
        raise


def _take(folder: Path, *, anew: bool) -> None:
    """Make sure that no other process has the folder of a stage; with `anew`, empty it."""
    run_dir = RunDir(folder)
    run_dir.take(anew=anew)
    run_dir.release()


def _summarize(stages: Sequence[Stage], outcome: dict[str, Any]) -> dict[str, Any]:
    """Write the summary of all stages from those of each that has one, and return it."""
    each = {stage.name: RunDir(stage.folder).read_summary() for stage in stages}
    each = {name: summary for name, summary in each.items() if summary}
    known = [one["eval_after"] for one in each.values() if one["eval_after"] is not None]
    first = stages[0]
    summary = outcome | {
        "run_name": first.settings.run.run_name.removesuffix(f"/{first.name}"),
        "steps": sum(one["steps"] for one in each.values()),
        "eval_before": next((one["eval_before"] for one in each.values()), None),
        "eval_after": known[-1] if known else None,
        "wall_s": sum(one["wall_s"] for one in each.values()),
        "stages": each,
    }
    folder = RunDir(first.folder.parent)
    folder.write_json(folder.summary.name, summary)
    return summary
