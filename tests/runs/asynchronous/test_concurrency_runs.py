"""`--rollout-concurrency` in whole runs: what it must not change, what a run says of it, and when it is refused."""

from __future__ import annotations

import json

import pytest
from slime_core.cli import main
from slime_core.rundir.events import read_events
from slime_core.rundir.records import read_records

#: What a run says of the limit itself.
OWN = ("perf/", "rollout/concurrency", "rollout/requests_", "engine/")
#: Each step takes waves of six prompts for four, the filter drops some, and the requests left over are aborted.
BUSY = (
    *("--num-rollout", "6", "--lr", "4.0", "--rollout-max-response-len", "5"),
    *("--over-sampling-batch-size", "6"),
    *("--dynamic-sampling-filter-path", "nonzero-std"),
)


def train(letters, name, *flags):
    assert main.run(["train", str(letters), *BUSY, "--run-name", name, *flags]) == 0
    return letters.parent / "runs" / name


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def left_of_it(run):
    """All that the run trained on, dropped, evaluated and learnt, without times and the limit's own metrics."""
    metrics = [{name: value for name, value in row.items() if not name.startswith(OWN)} for row in rows(run)]
    samples = [
        {name: value for name, value in sample.items() if name != "timings"}
        for file in sorted((run / "rollouts").glob("*.jsonl"))
        for sample in read_records(file)
    ]
    (table,) = sorted(run.glob("checkpoints/step_000006/**/table.npy"))
    return metrics, samples, table.read_bytes()


@pytest.fixture
def free(letters):
    return left_of_it(train(letters, "free"))


@pytest.mark.parametrize("limit", ["1", "7", "1000", "auto"])
def test_a_sync_run_is_the_same_bit_for_bit_with_any_limit(letters, free, limit):
    """The engine is the table of letters, whose draws depend on the seed alone."""
    assert left_of_it(train(letters, "limited", "--rollout-concurrency", limit)) == free


def test_a_limited_run_says_how_many_were_in_flight(letters):
    run = train(letters, "limited", "--rollout-concurrency", "7")
    steps = rows(run)[1:]
    assert {row["rollout/concurrency"] for row in steps} == {7.0}
    assert {row["rollout/requests_in_flight"] for row in steps} == {7.0}
    assert all(row["rollout/requests_waiting"] >= 6 * 16 - 7 for row in steps)
    assert not [
        event for event in read_events(run / "events.jsonl") if event["name"] == "concurrency_changed"
    ]


def test_a_run_without_a_limit_says_nothing_of_it(letters):
    names = {name for row in rows(train(letters, "free")) for name in row}
    assert not [name for name in names if name.startswith(OWN[1:])]


def test_a_limit_that_follows_the_load_begins_with_32(letters, monkeypatch):
    """It doubles with a later reading of the load, which a slow step may have."""
    monkeypatch.setattr("slime_core.rollout.concurrency.INTERVAL_S", 1000.0)
    first = rows(train(letters, "followed", "--rollout-concurrency", "auto"))[1]
    assert first["rollout/requests_in_flight"] == 32.0
    assert first["engine/kv_cache_usage"] == first["engine/retractions"] == 0.0


MUTE = """
from slime_core.testing.tabular import TabularEngine

def create(build):
    return TabularEngine()
"""


@pytest.mark.parametrize("command", ["check", "train"])
def test_auto_is_refused_where_the_engine_does_not_report_its_load(letters, capsys, monkeypatch, command):
    """A plain function, which an entry point of engines may be, says nothing of capabilities."""
    (letters.parent / "mute.py").write_text(MUTE)
    monkeypatch.syspath_prepend(str(letters.parent))
    words = [command, str(letters), "--rollout-engine", "mute:create"]
    assert main.run([*words, "--rollout-concurrency", "auto"]) == 2
    said = capsys.readouterr().err
    assert "rollout.rollout_concurrency: found auto with the engine 'mute:create'" in said
    assert "which does not report its load; wanted an engine that does, or a number" in said
    assert not (letters.parent / "runs").exists()
    assert main.run([*words, "--rollout-concurrency", "7"]) == 0


@pytest.mark.parametrize("value", ["0", "-3", "2.5", "many"])
def test_what_is_neither_a_number_nor_auto_is_refused(letters, capsys, value):
    assert main.run(["check", str(letters), "--rollout-concurrency", value]) == 2
    said = capsys.readouterr().err
    assert "--rollout-concurrency" in said
    assert "a whole number of at least 1 or 'auto'" in said
