"""Runs over a policy that is a table of letters, in this process, each in a tenth of a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry

TABULAR = "slime_core.testing.tabular:"
PARTS = {
    "tokenizer": "load_tokenizer", "rollout-engine": "create_engine", "train-backend": "create_trainer",
    "advantage-estimator": "credit", "loss-type": "reinforce", "loss-reducer": "per_token", "rm-type": "next_letter",
}  # fmt: skip
SIZES = {
    "rollout-batch-size": 4, "n-samples-per-prompt": 4, "rollout-max-response-len": 1, "lr": 4.0, "save-interval": 4,
    "eval-interval": 2, "label-key": "label", "tracker": "jsonl",
}  # fmt: skip


def flags_of(folder: Path) -> list[str]:
    """Make a model and data in a folder, and return the flags of a run on them."""
    (folder / "model").mkdir()
    rows = folder / "letters.jsonl"
    rows.write_text("".join(f'{{"input": "{letter}", "label": "x"}}\n' for letter in "abcdefghij"))
    files = {"hf-checkpoint": folder / "model", "prompt-data": rows, "output-dir": folder / "runs"}
    given = SIZES | files | {name: f"{TABULAR}{part}" for name, part in PARTS.items()}
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    return [*words, "--eval-prompt-data", "letters", str(rows), "--run-name", "letters"]


def trainer_in(folder: Path) -> Callable[..., Path]:
    """Return a function that trains in this process."""
    words = flags_of(folder)

    def run(num_rollout: int, *flags: str) -> Path:
        registry = Registry()
        settings = load_settings([], [*words, "--num-rollout", str(num_rollout), *flags], registry=registry)
        launch(settings, registry, drive)
        return folder / "runs/letters"

    return run


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Path]:
    """Train so many steps, or go on to them, with flags; returns the folder of the run `letters`."""
    return trainer_in(tmp_path)


@pytest.fixture(scope="module")
def module_train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Do so in a folder that the tests of a module share."""
    return trainer_in(tmp_path_factory.mktemp("letters"))


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., tuple[list[str], Path]]:
    """Return the words of a command that does so, and the run's folder."""
    words = flags_of(tmp_path)
    return lambda num_rollout, *flags: (
        [*words, "--num-rollout", str(num_rollout), *flags],
        tmp_path / "runs/letters",
    )


@pytest.fixture
def rows_of() -> Callable[[Path], dict[int, dict[str, float]]]:
    """Metrics by step, as `metrics.jsonl` of a run has them."""

    def read(run: Path) -> dict[int, dict[str, float]]:
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return {line.pop("step"): line for line in lines}

    return read
