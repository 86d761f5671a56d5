"""The events of whole runs: each request and decision is there and agrees with the records, also after a kill."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from slime_core.cli.main import run as slime_command
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry
from slime_core.rundir.events import read_events
from slime_core.rundir.records import read_records
from slime_core.testing.traces import check_trace

Event = dict[str, Any]

#: Of the recipe: held-out prompts, prompts of a step, samples of each.
HELD_OUT, PROMPTS, SAMPLES = 10, 4, 16
LOOPS = {
    "sync": ["--loop", "sync"],
    "one-step-off": ["--loop", "one-step-off"],
    "fully-async": ["--loop", "fully-async", "--max-staleness", "2"],
}
FILTER = ["--dynamic-sampling-filter-path", "letters.slow:some", "--over-sampling-batch-size", "6"]


@pytest.fixture
def train(letters, root, monkeypatch, tmp_path):
    """Return a function that trains six steps in this process, and returns the run's folder."""
    monkeypatch.syspath_prepend(root / "tests/plugins")

    def train(*flags: str) -> Path:
        given = [
            "--rollout-engine",
            "letters.slow:create_engine",
            "--num-rollout",
            "6",
            "--lr",
            "1.0",
            *flags,
        ]
        registry = Registry()
        launch(load_settings([str(letters)], given, registry=registry), registry, drive)
        return tmp_path / "runs/letters"

    return train


def events_of(folder: Path) -> list[Event]:
    return list(read_events(folder / "events.jsonl"))


def named(events: list[Event], name: str, **of: Any) -> list[Event]:
    return [event for event in events if event["name"] == name and of.items() <= event.items()]


def end(event: Event) -> float:
    return round(event["begin"] + event["seconds"], 6)


def is_within(inner: Event, outer: Event) -> bool:
    return outer["begin"] <= inner["begin"] and end(inner) <= end(outer)


def recorded(folder: Path, kind: str) -> dict[int, list[dict]]:
    """Return step -> its samples."""
    files = folder.glob(f"rollouts/{kind}_[0-9]*.jsonl")
    return {int(file.stem[-6:]): list(read_records(file)) for file in files}


def trace_of(folder: Path) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    assert slime_command(["trace", str(folder)]) == 0
    return check_trace(json.loads((folder / "trace.json").read_text())["traceEvents"])


def test_a_run_of_six_steps_has_these_events_and_no_others(train):
    """It is evaluated at 0 and 6, saved at 4 and 6, and sends its weights at the start and after each step."""
    events = events_of(train())
    counts = Counter(event["name"] for event in events if "at" not in event)
    requests = 6 * PROMPTS * SAMPLES + 2 * HELD_OUT
    assert counts == {
        "header": 1, "start_trainer": 1, "start_engine": 1, "start_rewards": 1, "step": 6, "rollout": 6, "dump": 6,
        "batch": 6, "train": 6, "update_weights": 7, "eval": 2, "save": 2, "request": requests, "reward": requests,
    }  # fmt: skip
    n = 6 * PROMPTS
    assert Counter(event["name"] for event in events if "at" in event) == {
        "weights_arrived": 7, "group_submitted": n, "group_finished": n, "group_kept": n, "step_filled": 6,
        "groups_wanted": 6,
    }  # fmt: skip
    assert [event["step"] for event in named(events, "eval")] == [0, 6]
    assert [event["step"] for event in named(events, "save")] == [4, 6]


def test_a_request_takes_as_long_as_its_engine_waits(train):
    """The engine waits for a time that the seed says, and the seed is that of the run beside the sample's number."""
    folder = train()
    seed = 42 << 40  # of the setting rollout_seed
    requests = named(events_of(folder), "request", evaluation=False)
    delays = {
        n: min(0.2, random.Random(seed + n).lognormvariate(-5, 1.2)) for n in range(6 * PROMPTS * SAMPLES)
    }
    assert sorted(event["sample"] for event in requests) == list(delays)
    assert all(event["seconds"] >= delays[event["sample"]] - 1e-4 for event in requests)
    (config,) = [line for line in (folder / "config.toml").read_text().splitlines() if "rollout_seed" in line]
    assert config == "rollout_seed = 42"


def test_phases_of_a_step_are_within_it_and_agree_with_its_metrics(train):
    folder = train()
    events = events_of(folder)
    steps = named(events, "step")
    assert all(end(before) <= after["begin"] for before, after in pairwise(steps))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    for step, row in zip(steps, metrics, strict=True):
        assert step["seconds"] == pytest.approx(row["perf/step_time"], abs=1e-5)
        for name in ("rollout", "dump", "batch", "train", "update_weights"):
            (phase,) = named(events, name, step=step["step"])
            assert is_within(phase, step)
            assert phase["seconds"] == pytest.approx(row[f"perf/{name}_time"], abs=1e-5)
        (rollout,) = named(events, "rollout", step=step["step"])
        first = (step["step"] - 1) * PROMPTS
        of_step = [
            event
            for event in named(events, "request", evaluation=False)
            + named(events, "reward", evaluation=False)
            if event["group"] in range(first, first + PROMPTS)
        ]
        assert len(of_step) == 2 * PROMPTS * SAMPLES
        assert all(is_within(event, rollout) for event in of_step)


@pytest.mark.parametrize("loop", LOOPS)
def test_decisions_are_those_of_the_records_and_follow_from_those_before(train, loop):
    folder = train(*LOOPS[loop], *FILTER)
    events = events_of(folder)
    group_of = {event["number"]: event["group"] for event in named(events, "group_submitted")}
    trained, dropped = recorded(folder, "step"), recorded(folder, "dropped_step")
    filled = named(events, "step_filled")
    assert [event["step"] for event in filled] == [1, 2, 3, 4, 5, 6]
    for event in filled:
        samples = trained[event["step"]]
        assert [group_of[number] for number in event["numbers"]] == [
            one["group_index"] for one in samples[::SAMPLES]
        ]
    for step, samples in dropped.items():
        told = [(event["group"], event["reason"]) for event in named(events, "group_dropped", step=step)]
        assert told == [(one["group_index"], one["dropped"]) for one in samples[::SAMPLES]]
        assert {group % 3 for group, _ in told} == {0}
    asked = Counter(event["sample"] for event in named(events, "request", evaluation=False))
    answered = {event["sample"] for event in named(events, "reward", evaluation=False, failed=False)}
    of_training = [sample["index"] for samples in trained.values() for sample in samples]
    assert all(asked[index] >= 1 and index in answered for index in of_training)
    assert taken_by_the_rule(events, in_waves=loop != "fully-async") == [event["numbers"] for event in filled]


def taken_by_the_rule(events: list[Event], *, in_waves: bool) -> list[list[int]]:
    """Return the groups that each step takes by the documented rule, of those kept at that moment: the first of them."""
    kept: list[int] = []
    found = []
    for event in events:
        if event["name"] == "group_kept":
            kept.append(event["number"])
        elif event["name"] == "step_filled":
            found.append(sorted((kept if in_waves else sorted(kept))[:PROMPTS]))
            kept = [number for number in kept if number not in found[-1]]
    return found


def test_staleness_follows_from_the_events_alone(train):
    folder = train(*LOOPS["fully-async"], "--update-weights-in-flight", "continue")
    events = events_of(folder)
    arrived = 0
    submitted: dict[int, int] = {}
    for event in events:
        arrived = event["version"] if event["name"] == "weights_arrived" else arrived
        if event["name"] == "group_submitted" and event["number"] not in submitted:
            submitted[event["number"]] = arrived
            assert event["version"] == arrived
    for event in named(events, "step_filled"):
        assert all(0 <= event["step"] - 1 - submitted[number] <= 2 for number in event["numbers"])
    again = Counter(event["number"] for event in named(events, "group_submitted"))
    interrupted = Counter(
        number for event in named(events, "groups_interrupted") for number in event["numbers"]
    )
    assert again - Counter(set(again)) == interrupted
    assert interrupted


def test_the_page_has_every_name_and_its_example_runs(train, root, capsys):
    page = (root / "docs/events.md").read_text()
    folder = train(*LOOPS["fully-async"], *FILTER, "--train-backend", "letters.phased:create_trainer")
    names = [event["name"] for event in events_of(folder)]
    assert all(f"`{name}`" in page or f"**{name}**" in page for name in set(names))
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(example.replace("runs/quickstart", str(folder)), {})
    assert capsys.readouterr().out.splitlines() == names


@pytest.mark.parametrize("loop", LOOPS)
def test_the_trace_of_a_run_is_whole(train, loop):
    folder = train(*LOOPS[loop])
    tracks = trace_of(folder)
    threads = {process: [name for of, name in tracks if of == process] for process, _ in tracks}
    assert list(threads) == ["run", "engine", "rewards"]
    assert threads["run"] == ["loop", "rollout", "dispatcher"]
    spans = Counter(name for slices in tracks.values() for name, *_ in slices)
    assert spans == Counter(event["name"] for event in events_of(folder) if "begin" in event)
    assert len(threads["engine"]) >= PROMPTS * SAMPLES  # all requests of the first step are in flight at once


def test_ranks_have_lanes_where_the_trainer_says_what_they_did(train):
    folder = train("--train-backend", "letters.phased:create_trainer")
    events = events_of(folder)
    for train_span in named(events, "train"):
        step = train_span["step"]
        for rank, begin in ((0, 0.001), (1, 0.002)):
            (outer,) = named(events, "optimizer_step", lane=f"rank {rank}", step=step)
            (inner,) = named(events, "forward_backward", lane=f"rank {rank}", step=step)
            assert is_within(inner, outer)
            assert is_within(outer, train_span)
            assert (
                begin - 2e-6 <= outer["begin"] - train_span["begin"] < begin + 0.03
            )  # the call begins a little later
            assert (outer["seconds"], inner["seconds"]) == pytest.approx((0.01, 0.005), abs=2e-6)
    tracks = trace_of(folder)
    assert [thread for process, thread in tracks if process == "trainer"] == ["rank 0", "rank 1"]


def test_a_run_without_events_has_no_file_and_says_how_to_have_one(train, capsys):
    folder = train("--no-events")
    assert not (folder / "events.jsonl").exists()
    assert slime_command(["trace", str(folder)]) == 2
    assert "unless events are switched off (--no-events)" in capsys.readouterr().err


@pytest.mark.faults
@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_that_is_killed_and_resumed_has_the_events_of_all_its_processes(
    letters, kill_after, root, monkeypatch, tmp_path, loop
):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(root / "tests/plugins"), os.environ.get("PYTHONPATH", "")])
    )
    command = [
        sys.executable,
        "-m",
        "slime_core",
        "train",
        str(letters),
        *LOOPS[loop],
        "--save-interval",
        "1",
    ]
    command += ["--rollout-engine", "letters.slow:create_engine", "--num-rollout", "30", "--lr", "1.0"]
    folder = tmp_path / "runs/letters"
    kill_after(command, folder / "metrics.jsonl", 6)
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"name":"request","lane":"eng')
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = events_of(folder)
    first, second = (number for number, event in enumerate(events) if event["name"] == "header")
    assert first == 0
    assert events[second]["step"] >= 4
    assert events[second]["wall_clock"] > events[0]["wall_clock"]
    restored = {event["number"]: event["group"] for event in named(events[second:], "group_restored")}
    assert (restored != {}) == (loop == "fully-async")
    processes = events[:second], events[second:]
    for step, samples in recorded(folder, "step").items():
        process = processes[step >= events[second]["step"]]
        (filled,) = named(process, "step_filled", step=step)[-1:] or [None]
        if (
            filled is not None
        ):  # not yet written when the process was killed, or taken ahead by the process before
            known = {event["number"]: event["group"] for event in process if "number" in event}
            found = [known[number] for number in filled["numbers"]]
            assert found == [sample["group_index"] for sample in samples[::SAMPLES]]
    told = {event["step"] for event in named(events, "step_filled")}
    assert told >= set(range(events[second]["step"] + 1, 31))
    spans = Counter(name for slices in trace_of(folder).values() for name, *_ in slices)
    assert spans == Counter(event["name"] for event in events if "begin" in event)
