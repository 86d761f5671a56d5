"""Tracker `jsonl`: one object a step in the run's `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl
from slime_core.rundir.rundir import RunDir


class JsonlTracker:
    """Appends each step's metrics to `metrics.jsonl`; the evaluation before training has step 0."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line."""
        self._run_dir.append_metrics(step, metrics)


def create_tracker(build: BuildContext) -> JsonlTracker:
    """Return the tracker for this run's folder."""
    return JsonlTracker(RunDir(build.run_dir))
