"""Signals: acknowledged at once; the steps that are whole are saved, and the run goes on from them as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry
from slime_core.rundir.records import read_records

PARTS = (
    *("--rollout-engine", "slow_parts:create_engine", "--train-backend", "slow_parts:create_trainer"),
    *("--tracker", "jsonl", "slow_parts:create_tracker"),
)


def rows(run: Path) -> list[dict[str, float]]:
    """Metrics of each step, without those of time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def samples(run: Path) -> list[str]:
    """Prompts and responses of each step."""
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [f"{sample['index']} {sample['tokens']}" for file in files for sample in read_records(file)]


def heard() -> None:
    """Hear SIGINT, SIGQUIT and SIGHUP also where the tests are a background job, or under nohup, which have it ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def interrupt(letters: Path, root: Path, tmp_path: Path) -> Callable[..., tuple[int, str, float]]:
    """Return a function that trains, sends signals at a place, and returns exit status, messages, and seconds to the first."""

    def interrupt(
        place: str, *signals: signal.Signals, flags: tuple[str, ...] = ()
    ) -> tuple[int, str, float]:
        halted = tmp_path / "halted"
        path = os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
        temporary = tmp_path / "temporary"
        temporary.mkdir(exist_ok=True)
        env = os.environ | {
            "PYTHONPATH": path,
            "TMPDIR": str(temporary),
            "HALT": place,
            "HALTED": str(halted),
        }
        if len(signals) > 1:  # the last of them ends the run at once: it must find it at its place
            env |= {"HALT_ROUNDS": "600_000_000"}
        command = [sys.executable, "-m", "slime_core", "train", str(letters), *PARTS, *flags]
        with subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heard,
        ) as process:
            deadline = time.monotonic() + 60
            while place and not halted.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)  # the command needs the cores
            told, seconds = "", 0.0
            assert process.stderr is not None
            for number in signals:
                began = time.monotonic()
                process.send_signal(number)
                while f"{number.name}: " not in told:
                    line = process.stderr.readline()
                    assert line, told
                    told += line
                seconds = seconds or time.monotonic() - began
                time.sleep(0.3)  # a signal that comes twice within 0.2 s is one
            return process.wait(60), told + process.stderr.read(), seconds

    return interrupt


def train(recipe: Path, name: str) -> dict[str, Any]:
    """Train to the end, without anything that halts."""
    registry = Registry()
    settings = load_settings([str(recipe)], ["--run-name", name], registry=registry)
    return launch(settings, registry, drive)


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


@pytest.mark.parametrize(
    ("place", "number", "saved"),
    [
        ("rollout 5", signal.SIGINT, 5),  # step 6 was running
        pytest.param("train 3", signal.SIGTERM, 3, marks=pytest.mark.faults),  # training is not cut short
        ("eval 6", signal.SIGHUP, 6),  # step 6 is trained, and evaluated when the run goes on
        ("log 3", signal.SIGQUIT, 3),  # step 3 is whole, and no checkpoint of it is due
        # Step 4 is whole, and its own checkpoint was about to be written.
        pytest.param("log 4", signal.SIGTERM, 4, marks=pytest.mark.faults),
    ],
)
def test_interrupted_run_goes_on_as_if_nothing_had_been(interrupt, letters, tmp_path, place, number, saved):
    status, told, seconds = interrupt(place, number)
    assert status == 128 + number, told
    assert seconds < 1.5  # train 3 blocks the event loop for longer
    assert "Traceback" not in told
    assert list((tmp_path / "temporary").iterdir()) == []
    run = tmp_path / "runs/letters"
    summary = summary_of(run)
    assert (summary["status"], summary["steps"], summary["eval_after"]) == ("interrupted", saved, None)
    assert sorted(path.name for path in (run / "checkpoints").iterdir())[-1] == f"step_{saved:06d}"
    for name in ("letters", "whole"):
        train(letters, name)
    assert rows(run) == rows(tmp_path / "runs/whole")
    assert samples(run) == samples(tmp_path / "runs/whole")
    assert summary_of(run)["eval_after"] == summary_of(tmp_path / "runs/whole")["eval_after"]


def test_metrics_that_were_written_before_their_step_was_saved_anew_are_not_written_twice(
    interrupt, letters, tmp_path
):
    """A run that goes on evaluates and logs its last step, and saves: here it ended between the two."""
    interrupt("eval 6", signal.SIGTERM)
    run = tmp_path / "runs/letters"
    before = (run / "metrics.jsonl").read_text()
    assert [row["step"] for row in rows(run)] == list(range(6))
    (run / "metrics.jsonl").write_text(before + json.dumps({"step": 6, "train/loss": 0.0}) + "\n")
    for name in ("letters", "whole"):
        train(letters, name)
    assert rows(run) == rows(tmp_path / "runs/whole")


def test_second_signal_ends_at_once_and_lets_go_of_the_folder(interrupt, letters, tmp_path):
    status, told, _ = interrupt("train 3", signal.SIGINT, signal.SIGQUIT)
    assert status == 128 + signal.SIGQUIT
    assert "SIGQUIT: ending at once" in told
    assert summary_of(tmp_path / "runs/letters")["status"] == "interrupted"
    assert train(letters, "letters")["status"] == "completed"


def test_interrupt_before_the_first_step_is_done_saves_nothing(interrupt, tmp_path):
    status, _, _ = interrupt("eval 0", signal.SIGINT)
    assert status == 130
    summary = summary_of(tmp_path / "runs/letters")
    assert (summary["status"], summary["steps"], summary["eval_before"]) == ("interrupted", 0, None)
    assert list((tmp_path / "runs/letters/checkpoints").iterdir()) == []
