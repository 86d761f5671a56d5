"""Tracker `swanlab`: metrics and tables of samples at SwanLab."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl
from slime_core.samples import Group

from slime_trackers.remembered_id import remember_id, remembered_id
from slime_trackers.sample_table import COLUMNS, SampleTable
from slime_trackers.section import SwanlabSection

if TYPE_CHECKING:
    from slime_core.run.run import Run

_ID_FILE = "swanlab_id"
#: A slime run's end -> SwanLab's.
_ENDED = {"completed": "success", "interrupted": "aborted"}


class SwanlabTracker:
    """One SwanLab experiment for a slime run, resumed with it where SwanLab has a server."""

    def __init__(self, section: SwanlabSection, table: SampleTable) -> None:
        self._section, self._table = section, table
        self._run: Any = None

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        """Begin the experiment, or go on with it."""
        import swanlab

        section = self._section
        known = section.run_id or remembered_id(run.run_dir, _ID_FILE) or secrets.token_hex(8)
        remember_id(run.run_dir, _ID_FILE, known)
        with _signals_kept():
            self._run = swanlab.init(
                project=section.project,
                workspace=section.workspace,
                name=run.settings.run.run_name,
                group=section.group,
                id=known,
                resume="allow",
                mode=section.mode,
                log_dir=section.log_dir or str(run.run_dir.path / "swanlab"),
                config=tomllib.loads(run.settings.to_toml(is_public=True)),
            )

    @hookimpl
    def slime_rollout_end(self, step: int, groups: Sequence[Group]) -> None:
        """Keep some samples for the step's table."""
        self._table.take(step, groups)

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics, and its samples as the table `samples`."""
        import swanlab

        shown: dict[str, Any] = dict(metrics)
        if rows := self._table.give(step):
            shown["samples"] = swanlab.echarts.Table().add(list(COLUMNS), [list(each) for each in rows])
        self._run.log(shown, step=step)

    @hookimpl
    def slime_run_end(self, summary: Mapping[str, Any]) -> None:
        """End the experiment as the run ended."""
        if self._run is not None:
            status = str(summary.get("status"))
            state = _ENDED.get(status, "crashed")
            self._run.finish(state=state, error=status if state == "crashed" else None)


def create_tracker(build: BuildContext) -> SwanlabTracker:
    """Return the tracker for a run."""
    return SwanlabTracker(build.section(SwanlabSection), SampleTable.of(build.settings))


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Leave Ctrl-C to the run, which saves: SwanLab's own handler would end the experiment first."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
