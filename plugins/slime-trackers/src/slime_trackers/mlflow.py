"""Tracker `mlflow`: metrics, settings and tables of samples as a run of an MLflow experiment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl
from slime_core.samples import Group

from slime_trackers.remembered_id import remember_id, remembered_id
from slime_trackers.sample_table import COLUMNS, SampleTable
from slime_trackers.section import MlflowSection

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_core.run.run import Run

_ID_FILE = "mlflow_run_id"
#: A slime run's end -> MLflow's.
_ENDED = {"completed": "FINISHED", "interrupted": "KILLED"}


class MlflowTracker:
    """One MLflow run for a slime run, resumed with it."""

    def __init__(self, section: MlflowSection, table: SampleTable) -> None:
        self._section, self._table = section, table
        self._client: Any = None
        self._id = ""

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        """Begin the MLflow run, or go on with it; its settings are parameters, and a file as a recipe."""
        from mlflow import MlflowClient

        section = self._section
        client = MlflowClient(tracking_uri=_store(section, run))
        known = section.run_id or remembered_id(run.run_dir, _ID_FILE)
        if known is None:
            found = client.get_experiment_by_name(section.experiment_name)
            experiment = found.experiment_id if found else client.create_experiment(section.experiment_name)
            known = client.create_run(experiment, run_name=run.settings.run.run_name).info.run_id
            _log_parameters(client, known, run.settings)
        else:
            client.update_run(known, status="RUNNING")
        remember_id(run.run_dir, _ID_FILE, known)
        client.log_text(known, run.settings.to_toml(), "config.toml")
        self._client, self._id = client, known

    @hookimpl
    def slime_rollout_end(self, step: int, groups: Sequence[Group]) -> None:
        """Keep some samples for the step's table."""
        self._table.take(step, groups)

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics, and its table of samples as `samples/step_000001.json`."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = [Metric(_key(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)
        if rows := self._table.give(step):
            columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
            self._client.log_table(self._id, columns, f"samples/step_{step:06d}.json")

    @hookimpl
    def slime_run_end(self, summary: Mapping[str, Any]) -> None:
        """End the MLflow run as the run ended."""
        if self._client is not None:
            self._client.set_terminated(self._id, _ENDED.get(str(summary.get("status")), "FAILED"))


def create_tracker(build: BuildContext) -> MlflowTracker:
    """Return the tracker for a run."""
    return MlflowTracker(build.section(MlflowSection), SampleTable.of(build.settings))


def _store(section: MlflowSection, run: Run) -> str:
    """Return where runs are stored: by the setting, by MLflow's variable, else in the run's folder."""
    where = section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    where = where or (run.run_dir.path / "mlflow").resolve().as_uri()
    if (
        where.startswith("file:") or "://" not in where
    ):  # MLflow asks for leave before it stores runs as files
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return where


def _key(name: str) -> str:
    """Return a metric's name as MLflow takes it: without @, and with one slash, as a store of files has a folder for each."""
    group, slash, rest = name.replace("@", "_").partition("/")
    return group + slash + rest.replace("/", ".")


def _log_parameters(client: Any, run_id: str, settings: Settings) -> None:
    """Log every setting as `table.field`; MLflow takes 100 at once."""
    from mlflow.entities import Param

    given = [
        Param(f"{table}.{field}", str(value))
        for table, section in settings.sections.items()
        for field, value in section.model_dump(mode="json").items()
    ]
    for begin in range(0, len(given), 100):
        client.log_batch(run_id, params=given[begin : begin + 100])
