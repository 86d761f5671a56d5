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

FOLDERS = [Path(__file__).parent / name / "files" for name in ("hooks", "examples")]
TABULAR = "slime_core.testing.tabular:"
TORCH = ("--rollout-engine", "torch", "--train-backend", "megatron", "--no-bf16", "--lr", "1e-3")
ALGOS = ("--advantage-estimator", "grpo", "--loss-type", "policy_loss", "--loss-reducer", "sample-mean")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a run import the files of users."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    yield
    for file in (file for folder in FOLDERS for file in folder.glob("*.py")):
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


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A random qwen3 over letters."""
    import torch
    from slime_core.testing.tabular import EOS, VOCAB
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("letters-qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.3,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = WordLevel({chr(97 + i): i for i in range(EOS)} | {"end": EOS}, unk_token="a")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="end").save_pretrained(folder)
    return folder


@pytest.fixture
def with_megatron(train, model):
    """Train by Megatron's trainer and the engine torch."""

    def run(*flags: str):
        first = ("--hf-checkpoint", str(model), "--tokenizer", "hf", *TORCH, *ALGOS, "--num-rollout", "1")
        return train(*first, "--logprob-diff-limit", "5", *flags)

    return run
