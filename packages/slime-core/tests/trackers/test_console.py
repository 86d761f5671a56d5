"""What the console says of a run: its checkpoints before the first, and of each step all that it took."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.trackers.console import ConsoleTracker

STEP = {"rollout/raw_reward": 0.25, "perf/rollout_time": 3.0, "perf/train_time": 1.0, "perf/step_time": 4.5}


@pytest.fixture
def shown(tmp_path, recipe):
    """Return a tracker of a run with some flags, and a function that returns the lines that it printed."""

    def start(*flags: str, checkpoint_bytes: int | None = None):
        out = io.StringIO()
        tracker = ConsoleTracker(Console(file=out, soft_wrap=True), checkpoint_bytes=checkpoint_bytes)
        tracker.slime_run_start(
            SimpleNamespace(
                num_steps=12, start_step=1, done_steps=0, run_dir=SimpleNamespace(path=tmp_path),
                sizes=SimpleNamespace(rollout_batch_size=4, n_samples_per_prompt=8),
                settings=load_settings([str(recipe)], flags, registry=Registry()),
            )
        )  # fmt: skip
        return tracker, lambda: out.getvalue().splitlines()

    return start


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(
        '[model]\nhf_checkpoint = "m"\n[rollout]\nrollout_batch_size = 4\nrollout_max_response_len = 8\n'
    )
    return path


def test_a_steps_line_shows_saving_and_evaluation(shown):
    tracker, lines = shown()
    tracker.slime_step_end(3, STEP | {"perf/eval_time": 2.0, "eval/sums-pass@1": 0.5})
    assert len(lines()) == 3  # not before it is known what saving takes
    tracker.slime_progress(3, "save", 0, 1)
    tracker.slime_progress(3, "save", 1, 1)
    assert re.fullmatch(
        r"step  3/12  reward 0.250  6.5s: rollout 3.0, train 1.0, eval 2.0, save 0.0, other 0.5  sums-pass@1 0.500",
        lines()[3],
    )


def test_a_step_that_is_not_saved_is_shown_when_the_next_begins_or_the_run_ends(shown):
    tracker, lines = shown()
    tracker.slime_step_end(1, STEP)
    tracker.slime_progress(2, "rollout", 0, 4)
    assert lines()[3:] == ["step  1/12  reward 0.250  4.5s: rollout 3.0, train 1.0, other 0.5"]
    tracker.slime_step_end(2, STEP)
    tracker.slime_run_end({})
    assert [line[:10] for line in lines()[3:]] == ["step  1/12", "step  2/12"]


def test_two_steps_in_a_row_are_both_shown(shown):
    tracker, lines = shown()
    tracker.slime_step_end(0, {"eval/sums-pass@1": 0.5, "perf/eval_time": 2.0})
    tracker.slime_step_end(1, STEP)
    tracker.slime_run_end({})
    assert lines()[3:] == [
        "before  2.0s  sums-pass@1 0.500",
        "step  1/12  reward 0.250  4.5s: rollout 3.0, train 1.0, other 0.5",
    ]


@pytest.mark.parametrize(
    ("metrics", "is_shown"),
    [
        (
            {"train/loss": 9e-9, "train/pg_loss": 9e-9},
            False,
        ),  # one step on its own samples: advantages cancel
        ({"train/loss": 0.02, "train/pg_loss": 0.02}, True),
        ({"train/loss": 9e-9}, True),  # supervised: it has learned
        ({"train/loss": float("nan"), "train/pg_loss": float("nan")}, True),
    ],
)
def test_a_loss_that_is_0_by_construction_is_not_shown(shown, metrics, is_shown):
    tracker, lines = shown()
    tracker.slime_step_end(1, STEP | metrics)
    tracker.slime_run_end({})
    assert ("loss" in lines()[3]) is is_shown


@pytest.mark.parametrize(
    ("flags", "size", "wanted"),
    [
        (
            ["--save-interval", "5"],
            1_884_000_000,
            "checkpoints: every 5 steps and after the last step, about 1.9 GB each (estimated); the newest 2 are kept",
        ),
        (["--keep-checkpoints", "7"], None, "checkpoints: after the last step; the newest 7 are kept"),
        (["--no-save-last"], 10, "checkpoints: none (--save-interval, --save-last)"),
    ],
)
def test_checkpoints_are_told_of_before_the_first(shown, flags, size, wanted):
    _, lines = shown(*flags, checkpoint_bytes=size)
    assert lines()[1].startswith(wanted)


def test_checkpoints_that_do_not_fit_are_told_of_before_the_first(shown):
    _, lines = shown("--keep-checkpoints", "2", checkpoint_bytes=10**18)
    assert lines()[2].startswith("warning: up to 3000000000.0 GB of checkpoints do not fit into ")
