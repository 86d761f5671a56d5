"""The picture of a run, drawn from its metrics."""

from __future__ import annotations

import json
import warnings

from slime_core.rundir import RunDir
from slime_core.trackers.plot import PlotTracker


def end(folder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PlotTracker(RunDir(folder)).run_end({"run_name": "a run"})


def test_a_run_that_ended_before_its_first_step_leaves_no_picture(tmp_path):
    end(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_leaves_a_picture_of_rewards_and_accuracies(tmp_path):
    rows = [
        {"step": 0, "eval/sums-pass@1": 0.2},
        {"step": 1, "rollout/raw_reward": 0.1},
        {"step": 2, "rollout/raw_reward": 0.4, "eval/sums-pass@1": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    end(tmp_path)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
