"""An MLflow that fails, refuses and comes back: a run goes on, and MLflow gets what it missed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from slime_trackers.mlflow import _key, _log_table, _refused
from slime_trackers.sender import Sender


class Store(ThreadingHTTPServer):
    """As much of MLflow's REST interface as a run asks for; as many batches of metrics fail as `n_failures` says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.n_failures, self.status = folder, 0, "RUNNING"
        self.metrics: list[tuple[str, int]] = []
        self.tags: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        name = f"run-{self.server_port}"  # MLflow remembers by it where a run's files are
        info = {
            "run_id": name,
            "experiment_id": "1",
            "status": self.status,
            "artifact_uri": self.folder.as_uri(),
        }
        tags = [{"key": key, "value": value} for key, value in self.tags.items()]
        return {"run": {"info": info, "data": {"tags": tags}}}


class Handler(BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        found = (
            {"experiment": {"experiment_id": "1", "name": "slime"}}
            if "experiments" in self.path
            else self.server.run()
        )
        self.answer(200, found)

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        what, store = self.path.rpartition("/")[2], self.server
        if what == "log-batch" and given.get("metrics"):
            if store.n_failures > 0:
                store.n_failures -= 1
                self.answer(503, {})
                return
            store.metrics += [(each["key"], int(each.get("step", 0))) for each in given["metrics"]]
        if what == "set-tag":
            store.tags[given["key"]] = given["value"]
        if what == "update":
            store.status = given["status"]
        self.answer(200, self.server.run() | {"run_info": self.server.run()["run"]["info"]})

    def answer(self, status: int, found: dict[str, Any]) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "artifacts").mkdir()
    with Store(tmp_path / "artifacts") as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("n_failures", [1, 3])
def test_a_run_goes_on_without_mlflow_which_gets_every_step_when_it_answers(
    store, train, rows_of, n_failures
):
    store.n_failures = n_failures
    run = train(6, "--use-mlflow", "--mlflow-tracking-uri", f"http://127.0.0.1:{store.server_port}")
    wanted = [(_key(name), step) for step, metrics in sorted(rows_of(run).items()) for name in metrics]
    assert store.metrics == wanted
    assert store.status == "FINISHED"
    assert len(list(store.folder.glob("samples/*.json"))) == 6


def test_a_run_completes_where_mlflow_answers_no_more(store, train, rows_of):
    store.n_failures = 10**9
    run = train(4, "--use-mlflow", "--mlflow-tracking-uri", f"http://127.0.0.1:{store.server_port}")
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    assert store.metrics == []


def test_a_name_that_mlflow_refuses_is_sent_as_one_that_it_takes(train, rows_of, tmp_path):
    from mlflow import MlflowClient

    rows = str(tmp_path / "letters.jsonl")
    run = train(2, "--use-mlflow", "--eval-prompt-data", "sums (hard), 100%", rows)
    client = MlflowClient(tracking_uri=(run / "mlflow").as_uri())
    found = client.get_run((run / "mlflow_run_id").read_text().strip()).data.metrics
    assert "eval/sums _hard__ 100_" in found
    assert len(found) == len({name for metrics in rows_of(run).values() for name in metrics})


def test_what_mlflow_itself_refuses_is_told_from_what_it_could_not_be_asked():
    from mlflow.exceptions import MlflowException, RestException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    assert _refused(MlflowException("a name", INVALID_PARAMETER_VALUE))
    assert _refused(RestException({"error_code": "INVALID_PARAMETER_VALUE", "message": "a name"}))
    assert not _refused(MlflowException("API request failed with exception"))
    assert not _refused(OSError("away"))


def test_calls_are_made_in_order_again_from_the_one_that_failed_and_one_that_is_refused_is_left_out(caplog):
    made: list[int] = []
    fails, tried = {2}, threading.Event()

    def call(number: int) -> None:
        if number in fails:
            tried.set()
            raise ValueError("never") if number == 4 else OSError("away")
        made.append(number)

    sender = Sender("it", refused=lambda error: isinstance(error, ValueError))
    for number in (1, 2, 3):
        sender.send(lambda number=number: call(number))
    assert tried.wait(10)
    assert made == [1]
    fails ^= {2, 4}
    sender.send(lambda: call(4))
    sender.send(lambda: call(5))
    sender.close(10)
    assert made == [1, 2, 3, 5]
    assert "it: refused a call, which is left out: ValueError: never" in caplog.text
    assert "calls were not made" not in caplog.text


def test_the_end_waits_so_long_for_a_call_that_hangs(caplog):
    hangs = threading.Event()
    sender = Sender("it")
    sender.send(hangs.wait)
    sender.close(0.01)
    hangs.set()
    assert "it: 1 calls were not made" in caplog.text


def test_a_table_takes_the_place_of_the_one_before_and_many_are_listed_as_far_as_a_tag_holds_them(
    tmp_path, monkeypatch
):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=tmp_path.as_uri())
    run_id = client.create_run(client.create_experiment("e")).info.run_id
    row = (1, 0, 0, "a", "b", "c", 0.5, "completed")
    for step in [*range(1, 201), 200]:
        _log_table(client, run_id, [row], f"samples/step_{step:06d}.json")
    listed = json.loads(client.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert [each["path"][-8:] for each in listed][-2:] == ["199.json", "200.json"]
    assert len(listed) > 100
    (file,) = tmp_path.rglob("step_000200.json")
    assert json.loads(file.read_text())["data"] == [list(row)]
