"""Runs whose engine loses its weights, and asks for them: each loop sends them again, and nothing is generated without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from slime_core.rundir.records import read_records


@pytest.mark.parametrize("loop", ["sync", "one-step-off", "fully-async"])
def test_an_engine_that_loses_its_weights_gets_them_again_and_the_run_goes_on(letters, root, tmp_path, loop):
    path = os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    flags = [
        "--rollout-engine",
        "letters.forgetful:create_engine",
        "--loop",
        loop,
        "--num-rollout",
        "8",
        "--lr",
        "4.0",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "slime_core", "train", str(letters), *flags],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "runs/letters"
    assert json.loads((run / "summary.json").read_text())["steps"] == 8
    arrived = [event["version"] for event in events(run, "weights_arrived")]
    assert set(arrived) == set(range(9))
    assert len(arrived) > 9 + 4  # of 512 requests and those of evaluations every 90th loses them
    assert arrived == sorted(arrived)
    used = Counter()
    for step in range(1, 9):
        for sample in read_records(run / f"rollouts/step_{step:06}.jsonl"):
            used[sample["index"]] += 1
            (version,) = sample["weight_versions"]
            assert step - 1 - int(version) in ((0,) if loop == "sync" else (0, 1))
    assert used == Counter(range(8 * 4 * 16))


def events(run: Path, name: str) -> list[dict]:
    """The run's events of a name, in order."""
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["name"] == name]
