"""Signals and a stubborn generator on a run whose ranks are Ray actors, on a cluster of its own: nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

#: A variable that all processes of a run inherit.
MARK = "SLIME_TEST_OF_RAY"


def left(mark: str) -> list[str]:
    """Processes that a run has started and that are still there."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in environment.read_bytes():
                found.append((environment.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def train(recipe: Path, root: Path, mark: str, *flags: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": path, MARK: mark}
    command = [
        *(sys.executable, "-m", "slime_core", "train", str(recipe), "--num-rollout", "5000", *flags),
        *("--train-backend", "letters.ranked:create_trainer", "--launcher", "ray"),
        *("--actor-num-gpus-per-node", "2", "--save-interval", "4000"),
    ]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_until_nothing_is_left(mark: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (found := left(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_driver_leaves_nothing_running(letters, root, tmp_path, number):
    mark, metrics = number.name, tmp_path / "runs/letters/metrics.jsonl"
    process = train(letters, root, mark)
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    told = process.communicate(timeout=90)[1]
    wait_until_nothing_is_left(mark, 60)
    assert process.returncode == 128 + number, told
    summary = json.loads((tmp_path / "runs/letters/summary.json").read_text())
    assert summary["status"] == "interrupted"
    (saved,) = (tmp_path / "runs/letters/checkpoints").iterdir()
    assert saved.name == f"step_{summary['steps']:06d}"


def test_a_stubborn_generator_ends_with_its_name_and_its_ranks(letters, root):
    generator = ("--custom-generate-function-path", "hostile_generators:swallows_cancellation")
    process = train(
        letters, root, "stubborn", *generator, "--eval-interval", "none", "--rollout-timeout-s", "2"
    )
    told = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert "in swallows_cancellation) does not end when it is cancelled" in told
    wait_until_nothing_is_left("stubborn", 60)


def test_a_rank_that_ray_kills_for_its_machines_memory_is_told_to_be(letters, root, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")  # so that any machine has too little
    process = train(letters, root, "memory")
    told = process.communicate(timeout=300)[1]
    assert process.returncode == 1, told
    assert "slime train: RankDied\n  rank " in told
    assert "Ray killed it, as its machine ran out of memory: Memory usage " in told
    wait_until_nothing_is_left("memory", 60)
