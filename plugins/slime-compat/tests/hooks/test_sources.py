"""Data source classes of a user, with the reference system's interface."""

from __future__ import annotations

import pytest

SOURCE = "--data-source-path"


def test_a_class_hands_out_prompts_and_goes_on_after_a_checkpoint(train):
    run = train(SOURCE, "own_source.Counting", "--num-rollout", "2", "--save-interval", "1")
    assert [one["prompt"] for one in run.samples()[::4]] == ["a", "b", "c", "d", "e", "a", "b", "c"]
    longer = train(SOURCE, "own_source.Counting", "--num-rollout", "3", "--save-interval", "1")
    assert [one["prompt"] for one in longer.samples("step_000003")[::4]] == ["d", "e", "a", "b"]


def test_a_class_hands_out_prompts_also_where_no_data_set_is_read(train):
    without = ("--disable-rollout-global-dataset", "--prompt-data", "none")
    run = train(SOURCE, "own_source.Counting", "--num-rollout", "1", *without)
    assert [one["prompt"] for one in run.samples()[::4]] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("name", ["Curriculum", "Plain"])
def test_a_class_of_the_runs_own_prompts_draws_what_the_run_draws(train, name):
    ours = train("--run-name", "ours", "--num-rollout", "2")
    theirs = train("--run-name", "theirs", "--num-rollout", "2", SOURCE, f"own_source.{name}")
    assert [one["tokens"] for one in theirs.samples()] == [one["tokens"] for one in ours.samples()]
    if name == "Curriculum":
        assert [one["metadata"]["offset"] for one in theirs.samples()] == [4] * 16 + [8] * 16
