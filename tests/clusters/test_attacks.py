"""Signals, kills and hostile rewards on a run whose ranks are Ray actors, on a cluster of its own: nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry

from ..plugins import hostile_scores
from ..servers.attacked import TOLD_S, Attacked, Runs

pytestmark = [pytest.mark.faults, pytest.mark.timeout(2400)]

RANK = "ray::RankProcess"


@pytest.fixture
def runs(letters: Path, root: Path, tmp_path: Path) -> Runs:
    command = [
        *(sys.executable, "-m", "slime_core", "train", str(letters), "--launcher", "ray"),
        *("--train-backend", "letters.ranked:create_trainer", "--actor-num-gpus-per-node", "2"),
    ]
    return Runs(command, tmp_path / "runs/letters", root)


@pytest.fixture
def whole(letters: Path, tmp_path: Path) -> list[dict[str, float]]:
    """Metrics of the run that nobody attacks, in one process."""
    registry = Registry()
    settings = load_settings([str(letters)], ["--run-name", "whole"], registry=registry)
    assert launch(settings, registry, drive)["status"] == "completed"
    return metrics(tmp_path / "runs/whole")


def metrics(run: Path) -> list[dict[str, float]]:
    """What was measured of each step, but for times and the number of ranks."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    return [
        {key: value for key, value in row.items() if not key.startswith("perf/") and key != "train/ranks"}
        for row in rows
    ]


def test_a_run_that_is_attacked_again_and_again_learns_what_one_learns_that_is_not(runs, whole):
    holding = ("--custom-generate-function-path", "slow_parts:generate")
    with runs.attacked(*holding, halt="rollout 2") as run:
        assert run.send(signal.SIGINT, to_group=True) < TOLD_S
        runs.check_interrupted(run.finish(), signal.SIGINT, 1)

    with runs.attacked(halt="train 3") as run:
        assert run.send(signal.SIGTERM) < TOLD_S
        runs.check_interrupted(run.finish(), signal.SIGTERM, 3)

    with runs.attacked(*holding, halt="rollout 6") as run:
        os.kill(run.find(RANK)[0], signal.SIGSTOP)
        run.kill()
        runs.check_saved(4)

    with runs.attacked(halt="train 6") as run:
        run.kill()
        runs.check_saved(4)

    with runs.attacked(halt="train 7") as run:  # which needs all of Ray, when a terminal is closed
        assert run.send(signal.SIGHUP, to_group=True) < TOLD_S
        runs.check_interrupted(run.finish(), signal.SIGHUP, 7)

    with runs.attacked(halt="train 8") as run:  # as timeout(1) and supervisors send it
        assert run.send(signal.SIGTERM, to_group=True) < TOLD_S
        runs.check_interrupted(run.finish(), signal.SIGTERM, 8)

    with runs.attacked(halt="train 9") as run:
        rank = run.find(RANK)[-1]
        os.kill(rank, signal.SIGKILL)
        assert run.finish() == 1
        assert "slime train: RankDied" in run.told
        assert f"(process {rank} on " in run.told
        assert (runs.summary["status"], runs.summary["steps"]) == ("failed", 8)

    with runs.attacked(halt="train 9") as run:
        run.send(signal.SIGTERM)
        run.send(signal.SIGINT)
        assert run.finish() == 128 + signal.SIGINT
        assert "SIGINT: ending at once" in run.told
        runs.check_saved(8)

    with runs.attacked() as run:
        assert run.finish() == 0, run.told
    assert runs.summary["status"] == "completed"
    assert metrics(runs.folder) == whole


@pytest.mark.parametrize("there", ["gcs_server", "default_worker.py", RANK])
def test_a_run_that_is_killed_while_ray_starts_leaves_nothing(runs, there):
    def is_there(run: Attacked) -> bool:
        return bool(run.find(there))

    with runs.attacked() as run:
        run.wait_for(lambda: is_there(run))
        run.kill()


def test_hostile_rewards_fail_by_name_and_the_run_goes_on_without_their_samples(runs, tmp_path):
    data = hostile_scores.write_rows(tmp_path / "hostile.jsonl")
    with runs.attacked("--prompt-data", str(data), *hostile_scores.FLAGS, "--on-reward-error", "drop") as run:
        assert run.finish(800) == 0, run.told
    hostile_scores.check_dropped(runs.folder)


def test_a_reward_that_kills_its_guard_ends_a_run_by_name_where_it_is_to(runs, tmp_path):
    data = hostile_scores.write_rows(tmp_path / "hostile.jsonl", ("kill_its_guard",))
    with runs.attacked("--prompt-data", str(data), *hostile_scores.FLAGS, "--rollout-batch-size", "1") as run:
        assert run.finish() == 2, run.told
        assert "slime train: RewardError\n  sample " in run.told
    assert (runs.summary["status"], runs.summary["steps"]) == ("failed", 0)
