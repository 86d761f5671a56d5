"""`--hf-checkpoint` of a launch script is a float8 folder, and training starts from it."""

from __future__ import annotations

import json

import pytest
from slime_core.cli.main import run as slime
from slime_models.hf.folder import HfCheckpoint
from slime_models.quantization.reading import open_weights


def test_training_starts_from_a_float8_folder(by_megatron, model, tmp_path):
    folder = tmp_path / "M-FP8"
    assert slime(["convert", "quantize", "--format", "fp8-block", str(model), str(folder)]) == 0
    assert any("float8" in str(tensor.dtype) for tensor in HfCheckpoint(folder).values())
    words = by_megatron(
        hf_checkpoint=folder,
        advantage_estimator="grpo",
        save_hf=tmp_path / "saved_{step}",
        lr=1e-12,
        num_rollout=1,
    )
    assert slime(words) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    # Engine and trainer have the same dequantised weights, and a learning rate of next to nothing leaves them as they are.
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-4 and row["train/grad_norm"] > 0
    saved, wanted = HfCheckpoint(tmp_path / "saved_1"), open_weights(folder)
    assert set(saved) == set(wanted)
    assert all(saved[name].float().allclose(wanted[name].float(), rtol=0, atol=1e-9) for name in wanted)
    original = HfCheckpoint(model)
    assert any(not saved[name].allclose(original[name], rtol=1e-4) for name in original)
    assert row["rollout/log_probs"] == pytest.approx(row["rollout/rollout_log_probs"], abs=1e-4)
