"""`slime bench ray-start`: what it reads off a run's lines, events and log of rank 0."""

from __future__ import annotations

import json
import time

import pytest
from slime_bench.ray_start import POINTS, of_events, of_rank, ray_start, reached_by


def test_lines_tell_what_is_reached_the_first_time_that_they_are_said():
    said = [
        (10.0, "slime train: reading no recipe, 3 flags\n"),
        (11.0, "run /tmp/x: 1 steps of 2 prompts\n"),
        (12.0, "   0.1 s  importing the trainer megatron, the engine torch\n"),
        (15.5, "   3.6 s  starting the trainer: the model is built\n"),
        (16.0, "   4.1 s  starting the engine\n"),
        (17.0, "   5.1 s  starting the engine\n"),
    ]
    assert reached_by(said) == {
        "settings are checked": 11.0,
        "imports begin": 12.0,
        "run is put together": 15.5,
        "trainer is started": 16.0,
    }


def test_events_tell_ends_of_what_starts_and_the_begin_of_the_first_rollout(tmp_path):
    lines = [
        {"name": "header", "version": 1, "wall_clock": 1000.0, "pid": 1, "step": 1, "lane": "loop"},
        {"name": "start_engine", "lane": "loop", "begin": 1.0, "seconds": 0.5, "step": 0},
        {"name": "update_weights", "lane": "loop", "begin": 2.0, "seconds": 0.25, "step": 0},
        {"name": "rollout", "lane": "rollout", "begin": 3.0, "seconds": 9.0, "step": 1},
        {"name": "update_weights", "lane": "loop", "begin": 15.0, "seconds": 1.0, "step": 1},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert of_events(tmp_path / "events.jsonl") == {
        "engine is started": 1001.5,
        "weights are sent": 1002.25,
        "first rollout": 1003.0,
    }


def test_log_of_a_rank_tells_when_its_process_was_there_and_had_imported():
    log = (
        "2026-11-24 03:00:10,250 INFO slime_ray.trainer.rank: imports took 6.00 s, and were done 1.25 s ago\n"
    )
    at = time.mktime((2026, 11, 24, 3, 0, 10, 0, 0, -1))
    assert of_rank(log) == {"rank's process": at - 7.0, "rank has imported": at - 1.0}
    assert of_rank("") == {}


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_both_ways_reach_every_point(capsys):
    assert ray_start(["--repeats", "1", "--most", "600", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (turn,) = found["turns"]
    assert list(turn["ray"]) == list(POINTS)
    assert list(turn["local"]) == [point for point in POINTS if "rank" not in point]
    assert found["difference_s"] == pytest.approx(
        turn["ray"]["first rollout"] - turn["local"]["first rollout"]
    )
