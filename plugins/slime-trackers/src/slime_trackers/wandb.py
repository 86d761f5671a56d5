"""Tracker `wandb`: metrics at Weights & Biases."""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl
from slime_core.rundir.rundir import RunDir

from slime_trackers.section import WandbSection

if TYPE_CHECKING:
    from slime_core.run.run import Run

_ID_FILE = "wandb_id"
_AXIS = "step"


class WandbTracker:
    """One W&B run for a slime run, resumed with it; all metrics over `step`."""

    def __init__(self, section: WandbSection) -> None:
        self._section = section
        self._run: Any = None

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        """Begin the W&B run, or go on with it."""
        import wandb

        section = self._section
        self._run = wandb.init(
            project=section.project,
            entity=section.team,
            group=section.group,
            name=run.settings.run.run_name,
            id=_run_id(run.run_dir, section.run_id),
            resume="allow",
            mode=section.mode,
            dir=section.dir or str(run.run_dir.path),
            config=tomllib.loads(run.settings.to_toml()),
            settings=wandb.Settings(**({} if section.host is None else {"base_url": section.host})),
        )
        self._run.define_metric(_AXIS)
        self._run.define_metric("*", step_metric=_AXIS)

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics."""
        self._run.log({_AXIS: step, **metrics})

    @hookimpl
    def slime_run_end(self, summary: Mapping[str, Any]) -> None:
        """End the W&B run; one that failed is marked so."""
        if self._run is not None:
            self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
            self._run.finish(exit_code=0 if summary.get("status") == "completed" else 1)


def create_tracker(build: BuildContext) -> WandbTracker:
    """Return the tracker for a run."""
    return WandbTracker(build.section(WandbSection))


def _run_id(run_dir: RunDir, wanted: str | None) -> str:
    """Return the id that was asked for, that of the run's earlier processes, or a new one; and remember it."""
    file = run_dir.path / _ID_FILE
    if wanted is None and file.exists():
        return file.read_text(encoding="utf-8").strip()
    found = wanted or secrets.token_hex(4)
    run_dir.write_text(_ID_FILE, found + "\n")
    return found
