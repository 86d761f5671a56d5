"""Taking the folder of a run: what is checked before anything in it is made or deleted."""

from __future__ import annotations

from pathlib import Path

from slime_core import checkpoint
from slime_core.config.sections import CheckpointSection, RunSection
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.rundir import RunDir


def take_folder(run_dir: RunDir, settings: Settings, *, model: Path) -> None:
    """Make the folder of a run, this process's until it is released; `run.overwrite` deletes an earlier run of the name.

    Raises:
        CheckpointError: the run is to start from a checkpoint that is not there.
        ConfigError: another process has the folder; or what would be deleted is no run, or is what the run starts from.
    """
    overwrite, load = settings.section(RunSection).overwrite, settings.section(CheckpointSection).load
    found = checkpoint.to_start_from(None if overwrite else run_dir.checkpoints, load=load)
    if overwrite:
        start = {"model.hf_checkpoint": model} | ({"checkpoint.load": found.path} if found else {})
        inside = [
            Problem(
                where,
                f"{path}, which --overwrite would delete",
                f"one outside {run_dir.path}",
                "give another --run-name",
            )
            for where, path in start.items()
            if path.resolve().is_relative_to(run_dir.path.resolve())
        ]
        if inside:
            raise ConfigError(inside)
    run_dir.take(anew=overwrite)
    run_dir.create()
