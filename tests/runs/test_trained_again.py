"""`slime replay` over Megatron's trainer: a step is trained again at the learning rate that it had."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
def test_a_step_of_a_run_whose_learning_rate_decays_is_trained_again_bit_for_bit(
    letters, qwen3, slime, tmp_path
):
    """The rate falls from 1e-3 to 0 over four steps, by a quarter each; the replay trains the third alone, after a checkpoint."""
    given = {
        "hf-checkpoint": qwen3, "rollout-engine": "torch", "train-backend": "megatron", "advantage-estimator": "grpo",
        "loss-type": "policy_loss", "loss-reducer": "sample-mean", "rm-type": "slime_bench.step.work:parity", "lr": "1e-3",
        "lr-decay-style": "linear", "num-rollout": 4, "n-samples-per-prompt": 4, "rollout-max-response-len": 6,
        "eval-interval": "none", "save-interval": 2,
    }  # fmt: skip
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    ended = slime("train", str(letters), "--no-bf16", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folder = tmp_path / "runs/letters"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/lr"] for row in rows] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    again = slime("replay", str(folder), "--step", "3")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trained step 3 of" in again.stdout and "bit for bit" in again.stdout
