"""Recorded runs whose decisions the simulator makes again: exactly, or it says where not."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from slime_core.cli.main import run as slime_command
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry
from slime_core.rundir.events import read_events

FILTER = ["--dynamic-sampling-filter-path", "letters.slow:some", "--over-sampling-batch-size", "6"]
PARTIAL = ["--loop", "sync", "--partial-rollout", "--rollout-max-response-len", "4", *FILTER]
ASYNC = ["--loop", "fully-async", "--max-staleness", "2"]
AS_COMPLETED = "--rollout-in-completion-order"
EQUAL = ["--dynamic-sampling-filter-path", "nonzero-std", "--lr", "5"]
RUNS = {
    "partial": PARTIAL,
    "partial, as completed, at most a step old": [*PARTIAL, AS_COMPLETED, "--max-staleness", "1"],
    "one-step-off": ["--loop", "one-step-off", *EQUAL],
    "async, as completed": [*ASYNC, AS_COMPLETED, *EQUAL],
    "async, continued, in several turns": [
        *("--custom-generate-function-path", "letters.slow:two_turns", "--rollout-max-response-len", "4"),
        *(*ASYNC, AS_COMPLETED, "--update-weights-in-flight", "continue", *FILTER),
    ],
    "async, dropped when old": [*ASYNC, AS_COMPLETED, "--max-staleness-policy", "drop", "--max-staleness", "0", *FILTER],
    "async, as completed, few requests": [*ASYNC, AS_COMPLETED, "--rollout-concurrency", "5", *EQUAL],
    "async, weights every other step, few requests": [*ASYNC, "--update-weights-interval", "2", "--rollout-concurrency", "9", *FILTER],
}  # fmt: skip


@pytest.fixture
def train(letters, root, monkeypatch, tmp_path):
    """Return a function that trains in this process, and returns the run's folder."""
    monkeypatch.syspath_prepend(root / "tests/plugins")

    def train(*flags: str) -> Path:
        given = [
            "--rollout-engine",
            "letters.slow:create_engine",
            "--num-rollout",
            "10",
            "--lr",
            "1.0",
            *flags,
        ]
        registry = Registry.from_environment()
        launch(load_settings([str(letters)], given, registry=registry), registry, drive)
        return tmp_path / "runs/letters"

    return train


def replayed(folder: Path, capsys) -> tuple[int, dict]:
    capsys.readouterr()
    status = slime_command(["simulate", "--replay", str(folder), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", RUNS)
def test_the_decisions_of_a_recorded_run_are_made_again(train, capsys, name):
    folder = train(*RUNS[name])
    status, found = replayed(folder, capsys)
    assert (status, found["difference"]) == (0, None)
    told = [event for event in read_events(folder / "events.jsonl") if event.get("lane") == "dispatcher"]
    assert found["names"] == Counter(event["name"] for event in told)


def rewritten(folder: Path, change) -> None:
    """Write the events anew, each as `change` returns it."""
    file = folder / "events.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


def test_a_decision_that_is_another_is_shown(train, capsys):
    folder = train(*RUNS["async, as completed"])

    def other(event):
        if event["name"] == "step_filled" and event["step"] == 3:
            event["numbers"][-1] += 100
        return event

    rewritten(folder, other)
    status, found = replayed(folder, capsys)
    assert (status, found["equal"]) == (1, False)
    recorded, made = found["difference"]["recorded"], found["difference"]["replayed"]
    assert recorded["numbers"] == [*made["numbers"][:-1], made["numbers"][-1] + 100]
    assert slime_command(["simulate", "--replay", str(folder)]) == 1
    assert (
        f"decision {found['difference']['number']} of {found['decisions']} differs" in capsys.readouterr().out
    )


def test_the_filter_decides_again_on_the_recorded_rewards(train, capsys):
    """A group that was kept, for its rewards differ, is dropped where its records say that all of them are 1."""
    folder = train(*RUNS["one-step-off"])
    file = folder / "rollouts/step_000002.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    group = samples[0]["group_index"]
    for sample in samples:
        sample["reward"] = 1.0 if sample["group_index"] == group else sample["reward"]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    status, found = replayed(folder, capsys)
    difference = found["difference"]
    assert (status, difference["recorded"]["name"]) == (1, "group_kept")
    dropped = {"name": "group_dropped", "reason": "zero_std_1.0"}
    assert difference["replayed"] == difference["recorded"] | dropped


@pytest.mark.parametrize("loop", ["sync", "fully-async"])
def test_a_run_that_was_killed_is_replayed_as_far_as_it_told(
    letters, kill_after, root, monkeypatch, tmp_path, capsys, loop
):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.syspath_prepend(root / "tests/plugins")
    command = [sys.executable, "-m", "slime_core", "train", str(letters), "--loop", loop, *FILTER]
    command += ["--rollout-engine", "letters.slow:create_engine", "--num-rollout", "200", "--lr", "1.0"]
    folder = tmp_path / "runs/letters"
    kill_after(command, folder / "metrics.jsonl", 6)
    status, found = replayed(folder, capsys)
    assert (status, found["difference"]) == (0, None)
    assert found["names"]["step_filled"] >= 4
    with (folder / "events.jsonl").open("a") as file:  # as another process begins that goes on with it
        file.write('{"name":"header","version":1,"wall_clock":0.0,"pid":1,"step":3}\n')
    assert slime_command(["simulate", "--replay", str(folder)]) == 0
    assert "the first of 2 processes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "partial",
        *(pytest.param(name, marks=pytest.mark.faults) for name in ("one-step-off", "async, as completed")),
    ],
)
def test_decisions_over_a_torch_engine_and_trainer_are_made_again(
    letters, qwen3, slime, tmp_path, capsys, name
):
    """Responses of a random model, most of them of a few letters and some of forty."""
    flags = {
        "partial": ["--partial-rollout", "--over-sampling-batch-size", "6", AS_COMPLETED],
        "one-step-off": ["--loop", "one-step-off"],
        "async, as completed": [*ASYNC, AS_COMPLETED],
    }[name]
    given = {
        "hf-checkpoint": qwen3, "rollout-engine": "torch", "train-backend": "megatron", "advantage-estimator": "grpo",
        "loss-type": "policy_loss", "loss-reducer": "sample-mean", "rm-type": "slime_bench.step.work:parity", "lr": "1e-3",
        "num-rollout": 5, "n-samples-per-prompt": 4, "rollout-max-response-len": 40, "torch-max-running-requests": 8,
        "dynamic-sampling-filter-path": "nonzero-std",
    }  # fmt: skip
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    ended = slime("train", str(letters), "--no-bf16", "--eval-interval", "none", *words, *flags)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    status, found = replayed(tmp_path / "runs/letters", capsys)
    assert (status, found["difference"]) == (0, None)
    assert found["names"]["step_filled"] == 5
    assert found["filtered"] >= 5 * 4


def test_what_cannot_be_replayed_is_refused(train, capsys):
    folder = train("--buffer", "priority")
    assert slime_command(["simulate", "--replay", str(folder)]) == 2
    assert "the dispatcher's decisions alone are replayed" in capsys.readouterr().err
    assert slime_command(["simulate", "--replay", str(folder), "--loop", "sync"]) == 2
    assert "--replay alone, or with --json" in capsys.readouterr().err
    assert slime_command(["simulate", "--replay", str(folder / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
