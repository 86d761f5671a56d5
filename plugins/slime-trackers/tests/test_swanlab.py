"""What SwanLab writes offline holds what `metrics.jsonl` holds, read back by its own reader."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OFFLINE = ("--use-swanlab", "--swanlab-mode", "offline")


def records(folder: Path) -> Iterator[Any]:
    """Records of all processes of a run, the oldest first."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for file in sorted(folder.glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        yield from map(Record.FromString, reader)
        reader.close()


@pytest.fixture(scope="module")
def resumed(module_train: Any) -> Path:
    """The folder of a run that was resumed."""
    for num_rollout in (4, 8):
        run: Path = module_train(num_rollout, *OFFLINE, "--swanlab-project", "sums", "--log-samples", "2")
    return run


def test_every_metric_of_every_step_is_there(resumed, rows_of):
    found: dict[int, dict[str, float]] = {}
    for record in records(resumed / "swanlab"):
        if record.WhichOneof("record_type") == "scalar":
            scalar = record.scalar
            found.setdefault(scalar.step, {})[scalar.key] = scalar.value.number
    assert found == {step: pytest.approx(metrics, rel=1e-6) for step, metrics in rows_of(resumed).items()}


def test_a_resumed_run_is_the_same_experiment_which_ended_well(resumed):
    started = [each.start for each in records(resumed / "swanlab") if each.HasField("start")]
    known = (resumed / "swanlab_id").read_text().strip()
    assert [(start.id, start.project, start.name) for start in started] == [(known, "sums", "letters")] * 2
    ended = [each.finish for each in records(resumed / "swanlab") if each.HasField("finish")]
    states = ended[0].DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number
    assert [states[each.state].name for each in ended] == ["RUN_STATE_FINISHED"] * 2


def test_samples_are_a_table(resumed):
    (file,) = (resumed / "swanlab").glob("run-*/media/echarts/005-*.json")
    text = file.read_text()
    table = json.loads(text)
    first = json.loads((resumed / "rollouts/step_000005.jsonl").read_text().splitlines()[0])
    assert "rollouts" not in text
    assert [row["step"] for row in table["rowData"]] == [5, 5]
    assert table["rowData"][0]["prompt"] == first["prompt"]
    assert table["rowData"][0]["response"] == first["response"]


def test_ctrl_c_stays_with_the_run(train):
    """SwanLab's own handler would end the experiment first."""
    before = signal.getsignal(signal.SIGINT)
    train(1, *OFFLINE)
    assert signal.getsignal(signal.SIGINT) is before
