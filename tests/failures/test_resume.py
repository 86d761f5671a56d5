"""kill -9 during rollout, training and saving (also in the background) of the real stack: the resumed run equals one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slime_core.errors import CheckpointError
from slime_core.rundir.checkpoint import latest
from slime_core.rundir.records import read_records

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1800)]


def steps(run: Path) -> list[dict[str, float]]:
    """Everything in the metrics that is not a time."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def samples(run: Path) -> list[tuple[int, int, list[int], list[float]]]:
    """Group, index, ids and log-probs of every sample that was trained on."""
    found = []
    for file in sorted((run / "rollouts").glob("step_*.jsonl")):
        for sample in read_records(file):
            found.append(
                (sample["group_index"], sample["index"], sample["tokens"], sample["rollout_log_probs"])
            )
    return found


def kill_during(command: list[str], run: Path, phase: str, *, step: int, env: dict[str, str]) -> None:
    """Start the command, and kill it -9 once `phase` of step `step` or a later one has begun."""
    (run / "phase").unlink(missing_ok=True)
    output = run.with_suffix(".out")
    with output.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 800
    try:
        while True:
            assert time.monotonic() < deadline
            assert process.poll() is None, output.read_text()
            words = (run / "phase").read_text().split() if (run / "phase").exists() else ["-1", "", "0", "0"]
            if int(words[0]) >= step and words[1] == phase and words[2] != words[3]:
                break
            time.sleep(0.003)  # the command needs the cores; a phase takes a tenth of a second or more
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_run_killed_three_times_equals_one_left_alone(root, tiny_llama, tmp_path):
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    }
    common = [
        "--hf-checkpoint", str(tiny_llama), "--output-dir", str(tmp_path), "--num-rollout", "10", "--save-interval", "2",
        "--eval-interval", "5", "--gym-eval-size", "16", "--rollout-batch-size", "4", "--rollout-max-response-len", "24",
        "--reward-timeout-s", "60", "--lr", "1e-3", "--rm-type", "slime_bench.step.work:parity", "--num-steps-per-rollout", "2",
        "--n-samples-per-prompt", "8",
    ]  # fmt: skip
    command = [sys.executable, "-m", "slime_core", "train", str(root / "recipes/quickstart.toml"), *common]
    left_alone, killed = tmp_path / "left-alone", tmp_path / "killed"
    with ThreadPoolExecutor(1) as beside:
        whole = beside.submit(
            subprocess.run,
            [*command, "--run-name", "left-alone", "--tracker", "jsonl"], env=env, capture_output=True, text=True,
        )  # fmt: skip
        command += ["--run-name", "killed", "--tracker", "jsonl", "phase_file:create_tracker"]
        in_background = [*command, "--async-save"]
        kill_during(in_background, killed, "rollout", step=4, env=env)
        held = env | {"HOLD_SAVE_OF_STEP": "6"}
        kill_during(in_background, killed, "train", step=7, env=held)  # while that checkpoint is written
        found = sorted(path.name for path in (killed / "checkpoints").iterdir())
        assert found == [".tmp_step_000006", "step_000002", "step_000004"]
        kill_during(command, killed, "save", step=8, env=env)
        ended = subprocess.run(in_background, env=env, capture_output=True, text=True)
    for one in (ended, whole.result()):
        assert one.returncode == 0, one.stdout + one.stderr
    assert steps(killed) == steps(left_alone)
    assert samples(killed) == samples(left_alone)
    assert (
        len({row["train/loss"] for row in steps(killed) if "train/loss" in row}) > 5
    )  # something was learned on
    summaries = [json.loads((run / "summary.json").read_text()) for run in (killed, left_alone)]
    assert summaries[0]["eval_after"] == summaries[1]["eval_after"]
    used = Counter(index for _, index, _, _ in samples(killed))
    assert sorted(used) == list(range(10 * 4 * 8))
    assert set(used.values()) == {1}
    every_flip_is_refused(killed / "checkpoints")


def every_flip_is_refused(folder: Path) -> None:
    """Flip a bit in each file of Megatron's newest checkpoint: it is named, and so is the one before it.

    A bit of its first byte, its last, and three others. Each time both are read whole; `test_every_one_of_200_flipped_bytes_is_found` draws more places, of small files.
    """
    (before, newest), draw = sorted(folder.iterdir()), random.Random(0)
    files, places = [path for path in sorted(newest.rglob("*")) if path.is_file()], []
    assert any(path.suffix == ".distcp" for path in files)
    latest(folder).verify()
    for path in files:
        n_bytes = path.stat().st_size
        places += [(path, at) for at in (0, n_bytes - 1, *(draw.randrange(n_bytes) for _ in range(3)))]
    for path, at in places:
        bit = draw.randrange(8)
        flip(path, at, bit)
        with pytest.raises(CheckpointError, match=f"the newest intact one before it is {before}: "):
            latest(folder).verify()
        flip(path, at, bit)
    latest(folder).verify()


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
