"""Tracker `wandb`: metrics at Weights & Biases."""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl
from slime_core.samples import Group

from slime_trackers.remembered_id import remember_id, remembered_id
from slime_trackers.sample_table import COLUMNS, SampleTable
from slime_trackers.section import WandbSection

if TYPE_CHECKING:
    from slime_core.run.run import Run

_ID_FILE = "wandb_id"
_AXIS = "step"


class WandbTracker:
    """One W&B run for a slime run, resumed with it; all metrics over `step`."""

    def __init__(self, section: WandbSection, table: SampleTable) -> None:
        self._section, self._table = section, table
        self._run: Any = None

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        """Begin the W&B run, or go on with it."""
        import wandb

        section = self._section
        known = section.run_id or remembered_id(run.run_dir, _ID_FILE) or secrets.token_hex(4)
        remember_id(run.run_dir, _ID_FILE, known)
        self._run = wandb.init(
            project=section.project,
            entity=section.team,
            group=section.group,
            name=run.settings.run.run_name,
            id=known,
            resume="allow",
            mode=section.mode,
            dir=section.dir or str(run.run_dir.path),
            config=tomllib.loads(run.settings.to_toml(is_public=True)),
            settings=wandb.Settings(**({} if section.host is None else {"base_url": section.host})),
        )
        self._run.define_metric(_AXIS)
        self._run.define_metric("*", step_metric=_AXIS)

    @hookimpl
    def slime_rollout_end(self, step: int, groups: Sequence[Group]) -> None:
        """Keep some samples for the step's table."""
        self._table.take(step, groups)

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics, and its samples as the table `samples`."""
        import wandb

        shown: dict[str, Any] = {_AXIS: step, **metrics}
        if rows := self._table.give(step):
            shown["samples"] = wandb.Table(columns=list(COLUMNS), data=[list(each) for each in rows])
        self._run.log(shown)

    @hookimpl
    def slime_run_end(self, summary: Mapping[str, Any]) -> None:
        """End the W&B run; one that failed is marked so."""
        if self._run is not None:
            self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
            self._run.finish(exit_code=0 if summary.get("status") == "completed" else 1)


def create_tracker(build: BuildContext) -> WandbTracker:
    """Return the tracker for a run."""
    return WandbTracker(build.section(WandbSection), SampleTable.of(build.settings))
