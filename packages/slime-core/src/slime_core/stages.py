"""Training by stages: the runs of one recipe, one after the other, and the summary of all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slime_core.assemble import make_build
from slime_core.config.sections import RunSection
from slime_core.config.stages import Stage
from slime_core.errors import CheckpointError, SlimeError
from slime_core.launchers.local import completed, drive
from slime_core.plugins.registry import Registry
from slime_core.run import Run
from slime_core.rundir import RunDir


def train_stages(stages: Sequence[Stage], registry: Registry) -> dict[str, Any]:
    """Run the stages one after the other, each by its own launcher; returns the summary of all.

    `summary.json` in the folder above theirs holds it too. A stage that was completed before is left as it is, and one that
    was not goes on from its newest checkpoint.

    Raises:
        SlimeError: a stage could not be started or failed; `summary.json` then says `failed`.
    """
    for stage in stages:
        try:
            make_build(stage.beforehand, registry)  # refuses what would else be seen when the stage begins
        except SlimeError as error:
            error.add_note(f"in stage {stage.name}")
            raise
    folder = RunDir(stages[0].folder.parent)
    status, failure = "failed", {}
    try:
        for i, stage in enumerate(stages):
            use = partial(_drive, stage=stage, later=[other.folder for other in stages[i + 1 :]])
            registry.resolve("slime.launchers", stage.settings.section(RunSection).launcher)(
                stage.settings, registry, use
            )
        status = "completed"
    except BaseException as error:
        failure = {"error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        summary = summary_of(stages, status) | failure
        if folder.path.is_dir():
            folder.write_json(folder.summary.name, summary)
    return summary


def summary_of(stages: Sequence[Stage], status: str) -> dict[str, Any]:
    """Return the summary of all stages from those of each that has one."""
    each = {stage.name: RunDir(stage.folder).read_summary() for stage in stages}
    each = {name: summary for name, summary in each.items() if summary}
    reached, first = list(each.values()), stages[0]
    known = [summary["eval_after"] for summary in reached if summary["eval_after"] is not None]
    return {
        "status": status,
        "run_name": first.settings.section(RunSection).run_name.removesuffix(f"/{first.name}"),
        "steps": sum(summary["steps"] for summary in reached),
        "eval_before": reached[0]["eval_before"] if reached else None,
        "eval_after": known[-1] if known else None,
        "wall_s": sum(summary["wall_s"] for summary in reached),
        "stages": each,
    }


async def _drive(run: Run, *, stage: Stage, later: Sequence[Path]) -> dict[str, Any]:
    """Drive the run of a stage, unless later ones began from weights that it would still change."""
    if run.settings.section(RunSection).overwrite:
        for folder in later:
            shutil.rmtree(folder, ignore_errors=True)
    begun = [folder for folder in later if folder.exists()]
    if begun and not completed(run):
        raise CheckpointError(
            f"{begun[0]}: found the run of a later stage, and stage {stage.name} has not taken all of its "
            f"{run.num_steps} steps; wanted stages that begin from the weights of a stage that is done: remove "
            f"{begun[0]}, choose another --run-name, or start anew with --overwrite"
        )
    return await drive(run, stage.leaves)
