"""What a step reports besides its loss: the work that was done, and how far the engine's log-probs are from ours."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.protocols import Metrics
from torch import Tensor

from slime_megatron.columns import Columns
from slime_megatron.trained import Step


def forwarded(steps: Sequence[Step], n_ranks: int) -> dict[str, float]:
    """Return the tokens of all micro-batches, and the slots that attention computes for them, on so many ranks each."""
    packed = [micro.packed for step in steps for micro in step]
    numbers = {"tokens": sum(p.n_tokens for p in packed), "slots": sum(p.n_slots for p in packed)}
    return {name: float(n_ranks * number) for name, number in numbers.items()}


def mismatch(columns: Columns, log_probs: Tensor | None) -> Metrics:
    """Return the mean difference between the engine's log-probs and ours, over trainable tokens that we have."""
    if columns.rollout_log_probs is None or log_probs is None:
        return {}
    mask = columns.loss_mask * log_probs.isfinite()
    difference = (log_probs.nan_to_num() - columns.rollout_log_probs).abs()
    mean = (difference * mask).sum() / mask.sum().clamp(min=1)
    return {"train/train_rollout_logprob_abs_diff": float(mean)}
