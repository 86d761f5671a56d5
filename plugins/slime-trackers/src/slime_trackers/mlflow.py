"""Tracker `mlflow`: metrics, settings and tables of samples as a run of an MLflow experiment."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.config.build import BuildContext
from slime_core.config.secrets import masked
from slime_core.plugins.hooks import hookimpl
from slime_core.samples import Group

from slime_trackers.remembered_id import remember_id, remembered_id
from slime_trackers.sample_table import COLUMNS, Row, SampleTable
from slime_trackers.section import MlflowSection
from slime_trackers.sender import Sender

if TYPE_CHECKING:
    from slime_core.config.settings import Settings
    from slime_core.run.run import Run

_ID_FILE = "mlflow_run_id"
#: A slime run's end -> MLflow's.
_ENDED = {"completed": "FINISHED", "interrupted": "KILLED"}
#: What MLflow calls an error of what it was sent.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
#: Seconds that what was not sent has at the run's end.
_LAST_S = 20.0
#: What MLflow takes at once, and the longest value of a tag.
_MOST_METRICS, _LONGEST_TAG = 1000, 8000


class MlflowTracker:
    """One MLflow run for a slime run, resumed with it.

    A run does not start where MLflow cannot be reached; once it has, it waits for none of MLflow's answers, and ends by none.
    """

    def __init__(self, section: MlflowSection, table: SampleTable) -> None:
        self._section, self._table = section, table
        self._client: Any = None
        self._id = ""
        self._sender: Sender | None = None

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
        client.log_text(known, run.settings.to_toml(is_public=True), "config.toml")
        self._client, self._id, self._sender = client, known, Sender("MLflow", refused=_refused)

    @hookimpl
    def slime_rollout_end(self, step: int, groups: Sequence[Group]) -> None:
        """Keep some samples for the step's table."""
        self._table.take(step, groups)

    @hookimpl
    def slime_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics, and its table of samples as `samples/step_000001.json`."""
        from mlflow.entities import Metric

        assert self._sender is not None
        now = int(1000 * time.time())
        values = [Metric(_key(name), value, now, step) for name, value in metrics.items()]
        for batch in itertools.batched(values, _MOST_METRICS):
            self._sender.send(functools.partial(self._client.log_batch, self._id, metrics=batch))
        if rows := self._table.give(step):
            file = f"samples/step_{step:06d}.json"
            self._sender.send(functools.partial(_log_table, self._client, self._id, rows, file))

    @hookimpl
    def slime_run_end(self, summary: Mapping[str, Any]) -> None:
        """End the MLflow run as the run ended, once it has what was not sent before."""
        if self._sender is not None:
            status = _ENDED.get(str(summary.get("status")), "FAILED")
            self._sender.send(functools.partial(self._client.set_terminated, self._id, status))
            self._sender.close(_LAST_S)


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
    """Return a metric's name as MLflow takes it: without what it refuses, and with one slash, as a store of files has a folder
    for each."""
    group, slash, rest = re.sub(r"[^\w\-. :/]", "_", name).partition("/")
    return group + slash + rest.replace("/", ".")


def _refused(error: Exception) -> bool:
    """Return whether MLflow refuses what it was sent, which it would again."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.error_code in _REFUSALS


def _log_table(client: Any, run_id: str, rows: Sequence[Row], file: str) -> None:
    """Write a table as MLflow shows it, in the place of one of a step that is computed again.

    MLflow's own `log_table` would append to that one, and lists all tables in one tag, which it cuts off at 8,000 characters
    and then cannot read; here the newest that fit are listed.
    """
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

    client.log_text(run_id, json.dumps({"columns": COLUMNS, "data": rows}), file)
    tag = client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]")
    this = {"path": file, "type": "table"}
    listed = [*(each for each in json.loads(tag) if each != this), this]
    while len(tag := json.dumps(listed)) > _LONGEST_TAG:
        del listed[0]
    client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, tag)


def _log_parameters(client: Any, run_id: str, settings: Settings) -> None:
    """Log every setting as `table.field`; MLflow takes 100 at once."""
    from mlflow.entities import Param

    given = [
        Param(f"{table}.{field}", str(masked(field, value)))
        for table, section in settings.sections.items()
        for field, value in section.model_dump(mode="json").items()
    ]
    for begin in range(0, len(given), 100):
        client.log_batch(run_id, params=given[begin : begin + 100])
