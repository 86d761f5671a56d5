"""The picture of a run, drawn from its metrics."""

from __future__ import annotations

import json
import warnings

import pytest
from matplotlib.figure import Figure
from slime_core.rundir.rundir import RunDir
from slime_core.trackers.plot import PlotTracker, draw, points, trailing_means


def end(folder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PlotTracker(RunDir(folder)).slime_run_end({"run_name": "a run"})


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


@pytest.mark.parametrize(
    ("steps", "lines"), [(5, ["each step"]), (19, ["each step"]), (20, ["each step", "mean of 5 steps"])]
)
def test_reward_and_accuracy_have_axes_of_their_own_and_a_short_run_has_no_mean(
    tmp_path, monkeypatch, steps, lines
):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    rows = [
        {"step": step, "rollout/raw_reward": 7.0 * step, "eval/sums-pass@1": 0.5}
        for step in range(1, steps + 1)
    ]
    draw(rows, tmp_path / "reward.png", title="a run")
    rewards, accuracies = drawn[0].axes
    assert (rewards.get_ylabel(), accuracies.get_ylabel()) == ("training reward", "held-out accuracy")
    assert [line.get_label() for line in rewards.lines] == lines
    assert [line.get_label() for line in accuracies.lines] == ["sums"]
    assert list(rewards.lines[0].get_ydata()) == [7.0 * step for step in range(1, steps + 1)]
    assert rewards.get_ylim()[1] >= 7.0 * steps
    assert 1.0 <= accuracies.get_ylim()[1] < 1.1
    assert rewards.get_xlim() == accuracies.get_xlim()


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 0, "eval/sums-pass@1": 0.2}],
        [{"step": 1, "rollout/raw_reward": -3.0}],
        [{"step": 1, "rollout/raw_reward": float("nan")}, {"step": 2, "rollout/raw_reward": 0.5}],
        [{"step": step, "rollout/raw_reward": step / 50} for step in range(1, 46)],
        [{"step": 1, "eval/a-pass@1": 0.1, "eval/b-pass@1": float("nan")}],
    ],
)
def test_a_run_of_any_length_is_drawn(tmp_path, rows):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    end(tmp_path)
    assert (tmp_path / "reward.png").exists()


def test_a_run_without_any_number_leaves_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/raw_reward": NaN}\n')
    end(tmp_path)
    assert not (tmp_path / "reward.png").exists()


def test_of_a_step_that_was_taken_again_the_last_value_is_drawn():
    rows = [
        {"step": 2, "x": 0.1},
        {"step": 1, "x": 0.3},
        {"step": 2, "x": 0.2},
        {"step": 3, "x": float("inf")},
    ]
    assert points(rows, "x") == [(1, 0.3), (2, 0.2)]


def test_a_mean_is_of_the_values_so_far_where_there_are_fewer():
    assert trailing_means([1.0, 3.0, 5.0, 7.0], 3) == [1.0, 2.0, 3.0, 5.0]
