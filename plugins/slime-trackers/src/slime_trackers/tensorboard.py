"""Tracker `tensorboard`: metrics as TensorBoard's event files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl
from slime_core.samples import Group

from slime_trackers.sample_table import SampleTable, as_markdown
from slime_trackers.section import TensorboardSection

if TYPE_CHECKING:
    from slime_core.run.run import Run


class TensorboardTracker:
    """Writes each metric over the step; a resumed run hides what it computes again."""

    def __init__(self, folder: Path, table: SampleTable) -> None:
        self._folder, self._table = folder, table
        self._writer: Any = None

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        """Open the event file, and write the configuration."""
        from tensorboardX import SummaryWriter

        first = run.start_step - (run.unlogged is not None) if run.done_steps else 0
        n_files = len(list(self._folder.glob("events.out.tfevents.*")))
        suffix = f".{n_files:06d}"  # two files of the same second would have one name
        self._writer = SummaryWriter(str(self._folder), purge_step=first, filename_suffix=suffix)
        self._writer.add_text(
            "config", "\n".join(f"    {line}" for line in run.settings.to_toml(is_public=True).splitlines())
        )

    @hookimpl
    def slime_rollout_end(self, step: int, groups: Sequence[Group]) -> None:
        """Keep some samples for the step's table."""
        self._table.take(step, groups)

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics, and its samples as the text `samples`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        if rows := self._table.give(step):
            self._writer.add_text("samples", as_markdown(rows), step)
        self._writer.flush()

    @hookimpl
    def slime_run_end(self, summary: Mapping[str, Any]) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


def create_tracker(build: BuildContext) -> TensorboardTracker:
    """Return the tracker for a run."""
    section, table = build.section(TensorboardSection), SampleTable.of(build.settings)
    if section.project_name is None:
        return TensorboardTracker(build.run_dir / "tensorboard", table)
    root = Path(os.environ.get("TENSORBOARD_DIR", "runs/tensorboard"))
    name = section.experiment_name or build.settings.run.run_name
    return TensorboardTracker(root / section.project_name / name, table)
