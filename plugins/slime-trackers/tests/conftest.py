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


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Path]:
    """Train so many steps, or go on to them, with flags; returns the folder of the run `letters`."""
    (tmp_path / "model").mkdir()
    rows = tmp_path / "letters.jsonl"
    rows.write_text("".join(f'{{"input": "{letter}", "label": "x"}}\n' for letter in "abcdefghij"))
    files = {"hf-checkpoint": tmp_path / "model", "prompt-data": rows, "output-dir": tmp_path / "runs"}
    given = SIZES | files | {name: f"{TABULAR}{part}" for name, part in PARTS.items()}

    def run(num_rollout: int, *flags: str) -> Path:
        words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
        words += ["--eval-prompt-data", "letters", str(rows), "--run-name", "letters"]
        registry = Registry()
        settings = load_settings([], [*words, "--num-rollout", str(num_rollout), *flags], registry=registry)
        launch(settings, registry, drive)
        return tmp_path / "runs/letters"

    return run


@pytest.fixture
def rows_of() -> Callable[[Path], dict[int, dict[str, float]]]:
    """Metrics by step, as `metrics.jsonl` of a run has them."""

    def read(run: Path) -> dict[int, dict[str, float]]:
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return {line.pop("step"): line for line in lines}

    return read
