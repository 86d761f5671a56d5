"""The real stack (megatron trainer, torch engine) on a tiny random model: it agrees with itself and it learns.

These tests run on whatever the machine has; marked `gpu` is the one that insists on CUDA.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import assemble

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def letters_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama over 27 letters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("letters-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=27,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=26,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def train(recipe: Path, model: Path, *flags: str) -> tuple[dict[str, object], list[dict[str, float]]]:
    registry = Registry()
    settings = load_settings(
        [str(recipe)],
        [
            "--hf-checkpoint", str(model), "--rollout-engine", "torch", "--train-backend", "megatron",
            "--advantage-estimator", "grpo", "--loss-type", "policy_loss", "--loss-reducer", "sample-mean",
            "--save-interval", "none", "--no-save-last", "--rollout-batch-size", "10", *flags,
        ],
        registry=registry,
    )  # fmt: skip

    async def main() -> dict[str, object]:
        return await drive(await assemble(settings, registry))

    summary = asyncio.run(main())
    rows = (recipe.parent / "runs/letters/metrics.jsonl").read_text().splitlines()
    return summary, [row for row in map(json.loads, rows) if row["step"] > 0]


def test_it_learns_letters(letters, letters_model):
    summary, rows = train(
        letters, letters_model, "--lr", "3e-3", "--num-rollout", "40", "--eval-interval", "40"
    )
    assert summary["eval_before"] <= 0.3
    assert summary["eval_after"] >= 0.8
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < 0.05  # bf16


def test_the_trainer_holds_to_the_ids_that_tokens_were_drawn_from(letters, letters_model):
    """Over all 27 letters its log-probs would be lower by a third of a nat and more: top-p 0.7 leaves two thirds."""
    _, rows = train(
        letters, letters_model, "--lr", "1e-3", "--num-rollout", "3", "--eval-interval", "none", "--no-bf16",
        "--rollout-top-p", "0.7", "--rollout-top-k", "12", "--num-steps-per-rollout", "2",
    )  # fmt: skip
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
    assert all(1 < row["rollout/top_p_kept_vocab_per_token"] <= 12 for row in rows)


def test_several_optimizer_steps_use_the_old_log_probs(letters, letters_model):
    _, rows = train(
        letters, letters_model, "--lr", "1e-3", "--num-rollout", "3", "--eval-interval", "none", "--no-bf16",
        "--num-steps-per-rollout", "4",
    )  # fmt: skip
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
    assert all(
        abs(row["train/ppo_kl"]) > 0 for row in rows
    )  # the later steps have moved away from the old policy


@pytest.mark.gpu
def test_cuda_runs_the_same_recipe(letters, letters_model):
    import torch

    assert torch.cuda.is_available()
    summary, rows = train(
        letters, letters_model, "--lr", "3e-3", "--num-rollout", "40", "--eval-interval", "40",
        "--save-interval", "10", "--async-save",
    )  # fmt: skip
    assert torch.cuda.max_memory_allocated() > 0
    assert summary["eval_after"] >= 0.8
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < 0.05
    _, exact = train(
        letters,
        letters_model,
        "--lr",
        "0",
        "--no-bf16",
        "--num-rollout",
        "3",
        "--eval-interval",
        "none",
        "--overwrite",
    )
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in exact) < 1e-4
