"""Rollout and evaluation functions of a user, with the reference system's signatures."""

from __future__ import annotations

import pytest
from slime_core.errors import PluginError

ROLLOUT = "--rollout-function-path"


def test_a_rollout_function_generates_scores_and_reports(train):
    run = train(ROLLOUT, "own_rollout.generate_rollout", "--num-rollout", "2")
    samples = run.samples()
    assert [sample["metadata"]["rollout_id"] for sample in samples] == [0] * 16 + [1] * 16
    assert all(sample["reward"] is not None and sample["weight_versions"] for sample in samples)
    assert [row["rollout/own_metric"] for row in run.rows if "rollout/own_metric" in row] == [4.0, 4.0]


def test_it_draws_what_the_default_rollout_draws(train, letters):
    ours = [sample["tokens"] for sample in train("--run-name", "ours").samples()]
    theirs = [
        s["tokens"] for s in train(ROLLOUT, "own_rollout.generate_rollout", "--run-name", "theirs").samples()
    ]
    bare = [s["tokens"] for s in train(ROLLOUT, "own_rollout.bare_rollout", "--run-name", "bare").samples()]
    assert theirs == ours and bare == ours


def test_its_evaluations_are_its_own(train, letters):
    held = ["--eval-interval", "2", "--eval-prompt-data", "held", str(letters.parent / "letters.jsonl")]
    run = train(ROLLOUT, "own_rollout.generate_rollout", "--num-rollout", "2", *held)
    assert len(run.samples("eval_step_000002")) == 10
    assert {"eval/held", "eval/held-pass@1"} <= set(run.rows[-1])


def test_groups_that_it_puts_back_are_generated_first(train):
    run = train(ROLLOUT, "own_rollout.buffering_rollout", "--num-rollout", "3")
    groups = [sorted({s["group_index"] for s in run.samples(f"step_{step:06d}")}) for step in (1, 2, 3)]
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_samples_that_it_makes_itself_get_numbers(train):
    run = train(ROLLOUT, "own_rollout.own_samples", "--num-rollout", "1")
    assert [(one["group_index"], one["index"]) for one in run.samples()] == [(i // 4, i) for i in range(16)]


def test_an_evaluation_function_brings_its_own_set(train):
    run = train("--eval-function-path", "own_rollout.eval_own", "--eval-interval", "1", "--num-rollout", "1")
    assert run.rows[-1]["eval/own"] == 0.5
    assert run.rows[-1]["eval/own/extra"] == 7.0
    assert run.summary["eval_after"] == 0.5


def test_a_rollout_that_returns_no_groups_is_refused(train):
    with pytest.raises(
        PluginError, match=r"own_rollout:no_groups: returned int '3'; wanted RolloutFnTrainOutput"
    ):
        train(ROLLOUT, "own_rollout.no_groups")
