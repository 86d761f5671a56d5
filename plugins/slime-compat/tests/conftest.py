"""A recipe over letters, whose policy is a table: a run takes a second and needs no torch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import assemble
from slime_core.rundir.records import read_records

FILES = Path(__file__).parent / "hooks" / "files"
TABULAR = "slime_core.testing.tabular:"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a run import the files of users."""
    monkeypatch.syspath_prepend(str(FILES))
    yield
    for file in FILES.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A recipe whose policy learns to answer each letter with the next one."""
    (tmp_path / "model").mkdir()
    rows = [{"input": letter, "label": chr(ord(letter) + 1)} for letter in "abcdefghij"]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "letters.toml"
    recipe.write_text(f"""
[run]
run_name = "letters"
output_dir = "{tmp_path}/runs"
num_rollout = 3
tracker = ["jsonl"]
[model]
hf_checkpoint = "{tmp_path}/model"
tokenizer = "{TABULAR}load_tokenizer"
[data]
prompt_data = "{tmp_path}/letters.jsonl"
label_key = "label"
[rollout]
rollout_engine = "{TABULAR}create_engine"
rollout_batch_size = 4
n_samples_per_prompt = 4
rollout_max_response_len = 3
[reward]
rm_type = "{TABULAR}next_letter"
[algorithm]
advantage_estimator = "{TABULAR}credit"
loss_type = "{TABULAR}reinforce"
loss_reducer = "{TABULAR}per_token"
[train]
train_backend = "{TABULAR}create_trainer"
lr = 1.0
""")
    return recipe


class Trained:
    """A run that is over."""

    def __init__(self, folder: Path, summary: dict[str, Any]) -> None:
        self.folder, self.summary = folder, summary

    @property
    def rows(self) -> list[dict[str, float]]:
        """Metrics, a row a step."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def samples(self, kind: str = "step_") -> list[dict[str, Any]]:
        """Return the recorded samples: of training, or of another kind."""
        files = sorted((self.folder / "rollouts").glob(f"{kind}*.jsonl"))
        return [sample for file in files for sample in read_records(file)]


@pytest.fixture
def train(letters: Path, tmp_path: Path) -> Callable[..., Trained]:
    """Train with flags, in this process; returns the run."""

    def run(*flags: str, recipe: Path = letters) -> Trained:
        registry = Registry()
        settings = load_settings([str(recipe)], flags, registry=registry)

        async def main() -> dict[str, Any]:
            return await drive(await assemble(settings, registry))

        return Trained(tmp_path / "runs" / settings.run.run_name, asyncio.run(main()))

    return run
