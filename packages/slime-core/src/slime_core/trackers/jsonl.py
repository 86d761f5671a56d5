"""Tracker `jsonl`: one object a step in the run's `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_core.build import BuildContext
from slime_core.rundir import RunDir

if TYPE_CHECKING:
    from slime_core.run import Run


class JsonlTracker:
    """Appends each step's metrics to `metrics.jsonl`; the evaluation before training has step 0."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def run_start(self, run: Run) -> None:
        """Nothing to do."""

    def phase(self, step: int, phase: str, done: int, total: int) -> None:
        """Nothing to do."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line."""
        self._run_dir.append_metrics(step, metrics)

    def run_end(self, summary: Mapping[str, Any]) -> None:
        """Nothing to do."""


def create_tracker(build: BuildContext) -> JsonlTracker:
    """Return the tracker for this run's folder."""
    return JsonlTracker(RunDir(build.run_dir))
