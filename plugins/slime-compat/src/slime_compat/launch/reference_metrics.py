"""Metrics of a step's samples under the reference system's names, where slime's own are others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from slime_core.protocols import Metrics
from slime_core.samples import Group, Status


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
