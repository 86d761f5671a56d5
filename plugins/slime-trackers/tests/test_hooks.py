"""Evaluations and replays, which tell no tracker but `jsonl`, whatever the recipe's trackers are."""

from __future__ import annotations

from slime_core.cli.main import run as slime
from slime_core.config.derive import trackers, with_trackers
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_trackers.hooks import _NEEDS


def test_an_evaluation_of_a_recipe_with_a_tracker_ends_and_does_not_tell_it(command, tmp_path):
    words, _ = command(2, "--use-tensorboard", "--use-mlflow", "--tb-project-name", "none")
    assert slime(["eval", *words, "--train-backend", "none"]) == 0
    folder = tmp_path / "runs/letters-eval"
    assert (folder / "metrics.jsonl").exists()
    assert not (folder / "mlflow").exists()


def test_a_run_of_one_tracker_has_none_that_a_flag_adds(command):
    words, _ = command(2, "--tracker", "console", *(f"--use-{name}" for name in _NEEDS))
    settings = load_settings([], words, registry=Registry())
    assert trackers(settings.run) == ["console", *_NEEDS]
    assert trackers(with_trackers(settings, "jsonl", origin="a test").run) == ["jsonl"]
