"""Tracker `trackio`: metrics and tables of samples in trackio's database, here or on a Space."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl
from slime_core.samples import Group

from slime_trackers.sample_table import COLUMNS, SampleTable
from slime_trackers.section import TrackioSection

if TYPE_CHECKING:
    from slime_core.run.run import Run


class TrackioTracker:
    """One trackio run for a slime run, resumed with it by its name."""

    def __init__(self, section: TrackioSection, table: SampleTable) -> None:
        self._section, self._table = section, table
        self._run: Any = None

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        """Begin the trackio run, or go on with it."""
        import trackio

        section = self._section
        self._run = trackio.init(
            project=section.project,
            name=run.settings.run.run_name,
            group=section.group,
            space_id=section.space_id,
            server_url=section.server_url,
            config=tomllib.loads(run.settings.to_toml(is_public=True)),
            resume="allow" if run.done_steps else "never",
            embed=False,
        )

    @hookimpl
    def slime_rollout_end(self, step: int, groups: Sequence[Group]) -> None:
        """Keep some samples for the step's table."""
        self._table.take(step, groups)

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics, and its samples as the table `samples`."""
        import trackio

        shown: dict[str, Any] = dict(metrics)
        if rows := self._table.give(step):
            shown["samples"] = trackio.Table(columns=list(COLUMNS), data=[list(each) for each in rows])
        self._run.log(shown, step=step)

    @hookimpl
    def slime_run_end(self, summary: Mapping[str, Any]) -> None:
        """End the trackio run, once all of it is stored."""
        if self._run is not None:
            self._run.finish()


def create_tracker(build: BuildContext) -> TrackioTracker:
    """Return the tracker for a run."""
    return TrackioTracker(build.section(TrackioSection), SampleTable.of(build.settings))
