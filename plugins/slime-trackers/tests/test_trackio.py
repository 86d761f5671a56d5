"""What trackio keeps in its database holds what `metrics.jsonl` holds, read back by trackio itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

READ = """
import json
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps({name: SQLiteStorage.get_logs("sums", name) for name in SQLiteStorage.get_runs("sums")}))
"""


@pytest.mark.slow
def test_every_metric_and_the_samples_are_there_and_a_resumed_run_is_the_same_run(command, rows_of, tmp_path):
    """In a process of their own: trackio reads TRACKIO_DIR when it is imported."""
    environ = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}

    def ran(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for num_rollout in (4, 8):
        words, run = command(num_rollout, "--use-trackio", "--trackio-project", "sums", "--log-samples", "2")
        ran("-m", "slime_core", "train", *words)
    logs = json.loads(ran("-c", READ).splitlines()[-1])
    assert list(logs) == ["letters"]
    found, tables = {}, {}
    for line in logs["letters"]:
        line.pop("timestamp")
        step = line.pop("step")
        if "samples" in line:
            tables[step] = line.pop("samples")
        found[step] = line
    assert found == {step: pytest.approx(metrics) for step, metrics in rows_of(run).items()}
    assert sorted(tables) == list(range(1, 9))
    first = json.loads((run / "rollouts/step_000005.jsonl").read_text().splitlines()[0])
    shown = tables[5]["_value"]
    assert [row["step"] for row in shown] == [5, 5]
    assert shown[0]["response"] == first["response"]
