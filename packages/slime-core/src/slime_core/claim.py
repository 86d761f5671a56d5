"""Taking the folder of a run: what is checked before anything in it is made or deleted, and what it says of the run."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

from slime_core import checkpoint
from slime_core.config.sections import CheckpointSection, RunSection
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.rundir import RunDir

logger = logging.getLogger(__name__)


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


def record(run_dir: RunDir, settings: Settings, registry: Registry, *, goes_on: bool) -> None:
    """Write the settings and plugins of a run that starts; where it goes on, log which settings are not as before."""
    if goes_on and (changed := changes(run_dir, settings)):
        logger.warning("%s goes on with other settings than before: %s", run_dir.path, ", ".join(changed))
    run_dir.write_text(run_dir.config.name, settings.to_toml())
    run_dir.write_json("plugins.lock.json", registry.lock())


def changes(run_dir: RunDir, settings: Settings) -> list[str]:
    """Return which settings are not those that the folder's run had, each as `section.key old -> new`."""
    if not run_dir.config.exists():
        return []
    before = tomllib.loads(run_dir.config.read_text(encoding="utf-8"))
    return [
        f"{table}.{key} {before[table][key]!r} -> {value!r}"
        for table, values in tomllib.loads(settings.to_toml()).items()
        for key, value in values.items()
        if before.get(table, {}).get(key, value) != value and (table, key) != ("run", "overwrite")
    ]
