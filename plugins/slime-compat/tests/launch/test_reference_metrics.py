"""Metrics under the reference system's names: by hand, and all of them in a run of a launch script by Megatron's trainer."""

from __future__ import annotations

import json

import pytest
from slime_compat.launch.reference_metrics import ALIASES, generation_speeds, step_metrics
from slime_core.cli.main import run as slime
from slime_core.samples import Group, Sample


def sample(index: int, length: int, trained: int, elsewhere: float = 0.0) -> Sample:
    return Sample(
        index=index, tokens=list(range(length + 1)), response_length=length, non_generation_time=elsewhere,
        loss_mask=[1] * trained + [0] * (length - trained),
    )  # fmt: skip


def test_tokens_a_second_of_each_gpu_and_of_the_longest_sample():
    groups = [Group([sample(0, 30, 10, elsewhere=2.0), sample(1, 30, 20, elsewhere=1.0), sample(2, 12, 12)])]
    found = generation_speeds(groups, rollout_s=4.0, gpus=2)
    assert found == {
        "perf/tokens_per_gpu_per_sec": 72 / 4 / 2,
        "perf/effective_tokens_per_gpu_per_sec": 42 / 4 / 2,
        "perf/longest_sample_tokens_per_sec": 30 / 4,
        "perf/longest_effective_sample_tokens_per_sec": 20 / 4,
        "perf/longest_sample_tokens_per_sec_without_non_generation": 30 / (4 - 1.5),  # of both longest ones
        "perf/longest_effective_sample_tokens_per_sec_without_non_generation": 20 / (4 - 1.0),
    }
    assert "without" not in str(generation_speeds([Group([sample(0, 3, 3)])], rollout_s=1.0, gpus=1))


def test_a_step_under_the_names_there():
    ours = {
        "train/loss": 1.0, "train/lr": 1e-3, "train/critic/lr": 2e-3, "train/critic/value_loss": 0.5, "perf/step_time": 10.0,
        "perf/train_time": 6.0, "perf/trainer_idle_share": 0.4, "perf/actor_train_time": 4.0, "perf/log_probs_time": 2.0,
        "perf/forward_tflop": 8.0, "perf/train_tokens": 1000.0, "perf/rollout_time": 3.0, "train/mean/returns": 0.25,
    }  # fmt: skip
    found = step_metrics(ours, step=3, optimizer_steps=2, global_batch_size=64, ranks=2)
    assert found == {
        "train/lr-pg_0": 1e-3, "train/critic-lr-pg_0": 2e-3, "train/critic-value_loss": 0.5, "train/step": 5, "rollout/step": 2,
        "train/global_batch_size": 64, "perf/train_wait_time": 4.0, "perf/wait_time_ratio": 0.4, "rollout/returns": 0.25,
        "perf/actor_train_tok_per_s": 250.0, "perf/log_probs_tflops": 8 / 2 / 2, "perf/actor_train_tflops": 3 * 8 / 4 / 2,
    }  # fmt: skip


#: What a run by Megatron's trainer with critic, reference, entropies, TIS and a saved checkpoint tells; others need what it has not.
REPORTED = {
    *(f"rollout/{name}" for name in (
        "rewards", "raw_reward", "truncated", "response_lengths", "total_lengths", "log_probs", "ref_log_probs", "rollout_log_probs",
        "values", "returns", "advantages", "kl", "entropy", "step", "response_len/mean", "response_len/median", "response_len/max",
        "response_len/min", "truncated_ratio", "repetition_frac",
    )),
    *(f"perf/{name}" for name in (
        "rollout_time", "tokens_per_gpu_per_sec", "effective_tokens_per_gpu_per_sec", "longest_sample_tokens_per_sec",
        "longest_effective_sample_tokens_per_sec", "train_wait_time", "train_time", "actor_train_time", "log_probs_time",
        "ref_log_probs_time", "data_preprocess_time", "update_weights_time", "save_model_time", "ref_model_update_time",
        "log_probs_tflops", "ref_log_probs_tflops", "actor_train_tflops", "actor_train_tok_per_s", "step_time", "wait_time_ratio",
        "sleep_time", "wake_up_time",
    )),
    *(f"train/{name}" for name in (
        "loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff", "ois", "tis",
        "tis_clipfrac", "tis_abs", "grad_norm", "lr-pg_0", "global_batch_size", "step", "critic-loss", "critic-value_loss",
        "critic-value_clipfrac", "critic-grad_norm", "critic-lr-pg_0",
    )),
    "passrate/pass@1", "passrate/pass@4",
}  # fmt: skip


def test_a_launch_script_reports_them_all(by_megatron, tmp_path):
    words = by_megatron(
        advantage_estimator="ppo",
        kl_coef=0.01,
        entropy_coef=0.01,
        num_steps_per_rollout=2,
        ref_update_interval=1,
    )
    assert slime([*words, "--use-tis", "--colocate"]) == 0
    first, row = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert not REPORTED - row.keys(), sorted(REPORTED - row.keys())
    assert all(row[theirs] == row[ours] for theirs, ours in ALIASES.items() if ours in row)
    assert (first["train/step"], row["train/step"], row["train/global_batch_size"]) == (1, 3, 8)
    # The first step's policy is the reference, and the engine's: their log-probs are the same numbers.
    assert first["rollout/log_probs"] == pytest.approx(first["rollout/ref_log_probs"], abs=1e-5)
    assert first["rollout/log_probs"] == pytest.approx(first["rollout/rollout_log_probs"], abs=1e-3)
    assert first["rollout/kl"] == pytest.approx(0.0, abs=1e-5)
