"""Metrics under the reference system's names, where slime's own are others: of a step's samples, and of slime's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from slime_core.protocols import Metrics
from slime_core.samples import Group, Status

#: Name there -> ours of the same quantity.
ALIASES: Mapping[str, str] = {
    **{
        f"rollout/{name}": f"train/mean/{name}"
        for name in (
            "log_probs",
            "ref_log_probs",
            "teacher_log_probs",
            "values",
            "advantages",
            "returns",
            "rewards",
        )
    },
    "rollout/kl": "train/reward_kl",
    "rollout/entropy": "train/entropy_loss",
    "rollout/opd_reverse_kl": "train/opd_reverse_kl",
    "train/lr-pg_0": "train/lr",
    "perf/data_preprocess_time": "perf/batch_time",
    "perf/save_model_time": "perf/save_time",
    "perf/wait_time_ratio": "perf/trainer_idle_share",
}
#: Begin of a critic's names, here and there.
_CRITIC, _THEIR_CRITIC = "train/critic/", "train/critic-"
#: Forward passes that an optimizer step is worth: one, and a backward pass of two.
_PASSES = 3


def step_metrics(
    metrics: Mapping[str, float], *, step: int, optimizer_steps: int, global_batch_size: int, ranks: int
) -> Metrics:
    """Return a step's metrics under the names that the reference system has for them.

    Args:
        metrics: of the step.
        step: its number, from 1.
        optimizer_steps: of each rollout.
        global_batch_size: samples of an optimizer step.
        ranks: of the trainer.
    """
    found: Metrics = {theirs: metrics[ours] for theirs, ours in ALIASES.items() if ours in metrics}
    for name, value in metrics.items():
        if name.startswith(_CRITIC):
            own = name.removeprefix(_CRITIC)
            found[_THEIR_CRITIC + ("lr-pg_0" if own == "lr" else own)] = value
    if "perf/rollout_time" in metrics:
        found["rollout/step"] = float(step - 1)
    if any(name.startswith("eval/") for name in metrics):
        found["eval/step"] = float(step - 1)
    if "train/loss" in metrics:
        found["train/step"] = float(step * optimizer_steps - 1)
        found["train/global_batch_size"] = float(global_batch_size)
    if "perf/step_time" in metrics and "perf/train_time" in metrics:
        found["perf/train_wait_time"] = metrics["perf/step_time"] - metrics["perf/train_time"]
    return found | _speeds(metrics, ranks=ranks)


def _speeds(metrics: Mapping[str, float], *, ranks: int) -> Metrics:
    """Return tokens a second of optimizer steps, and TFLOPs of each rank in them and in passes for log-probs."""
    tflop, found = metrics.get("perf/forward_tflop"), Metrics()
    if tflop is None:
        return found
    for name, passes in (("log_probs", 1), ("ref_log_probs", 1), ("actor_train", _PASSES)):
        if seconds := metrics.get(f"perf/{name}_time"):
            found[f"perf/{name}_tflops"] = passes * tflop / seconds / ranks
    if seconds := metrics.get("perf/actor_train_time"):
        found["perf/actor_train_tok_per_s"] = metrics["perf/train_tokens"] / seconds
    return found


def generation_speeds(groups: Sequence[Group], *, rollout_s: float, gpus: int) -> Metrics:
    """Return tokens a second of a rollout: of each GPU, and of its longest sample; `effective` without what generators put in.

    Args:
        groups: of the step.
        rollout_s: seconds of the rollout.
        gpus: of the engines.
    """
    if not rollout_s:
        return {}
    samples = [sample for group in groups for sample in group]
    found: Metrics = {}
    for key, lengths in (
        ("", [sample.response_length for sample in samples]),
        ("effective_", [sample.effective_response_length for sample in samples]),
    ):
        longest = max(lengths)
        found[f"perf/{key}tokens_per_gpu_per_sec"] = sum(lengths) / rollout_s / gpus
        found[f"perf/longest_{key}sample_tokens_per_sec"] = longest / rollout_s
        both = zip(samples, lengths, strict=True)
        elsewhere = fmean(sample.non_generation_time for sample, length in both if length == longest)
        if any(sample.non_generation_time for sample in samples) and elsewhere < rollout_s:
            name = f"perf/longest_{key}sample_tokens_per_sec_without_non_generation"
            found[name] = longest / (rollout_s - elsewhere)
    return found


def column_means(groups: Sequence[Group]) -> Metrics:
    """Return means of the batch's columns, as that system logs them."""
    samples = [sample for group in groups for sample in group]
    metrics: Metrics = {
        "rollout/response_lengths": fmean(sample.response_length for sample in samples),
        "rollout/total_lengths": fmean(len(sample.tokens) for sample in samples),
        "rollout/truncated": fmean(sample.status is Status.TRUNCATED for sample in samples),
    }
    means = [
        _masked_mean(sample.rollout_log_probs, sample.loss_mask)
        for sample in samples
        if sample.rollout_log_probs is not None and len(sample.rollout_log_probs)
    ]
    if means:
        metrics["rollout/rollout_log_probs"] = fmean(means)
    return metrics


def categories(groups: Sequence[Group], key: str) -> Metrics:
    """Return the share of samples whose reward dict has each value of `key`."""
    samples = [sample for group in groups for sample in group]
    found = Counter(
        str(one.reward[key]) for one in samples if isinstance(one.reward, dict) and key in one.reward
    )
    return {f"rollout/error_cat/{name}": count / len(samples) for name, count in found.items()}


def _masked_mean(values: Sequence[float], mask: Sequence[int] | None) -> float:
    """Return the mean over trained tokens; 0 without any."""
    counted = list(values) if mask is None else [one for one, m in zip(values, mask, strict=True) if m]
    return fmean(counted) if counted else 0.0
