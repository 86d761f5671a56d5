"""What a step reports besides its loss: the work that was done, and how far the engine's log-probs are from ours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.batch import TrainBatch
from slime_core.protocols import Metrics
from torch import Tensor

from slime_megatron.columns import Columns
from slime_megatron.trained import Step


def forwarded(steps: Sequence[Step], n_ranks: int) -> dict[str, float]:
    """Return the tokens of all micro-batches, and the slots that attention computes for them, on so many ranks each."""
    packed = [micro.packed for step in steps for micro in step]
    numbers = {"tokens": sum(p.n_tokens for p in packed), "slots": sum(p.n_slots for p in packed)}
    return {name: float(n_ranks * number) for name, number in numbers.items()}


def mismatch(
    batch: TrainBatch, columns: Columns, log_probs: Tensor | None, steps: Sequence[NDArray[np.int64]]
) -> Metrics:
    """Return the mean difference between the engine's log-probs and ours, over trainable tokens; nan where one of them is.

    Args:
        batch: the samples.
        columns: theirs.
        log_probs: ours [T], computed for the samples of `steps`.
        steps: optimizer steps of the batch.
    """
    if columns.rollout_log_probs is None or log_probs is None:
        return {}
    in_steps = np.isin(np.arange(len(batch)), np.concatenate(steps))
    of_tokens = np.repeat(in_steps, batch.response_lengths)
    trained = (columns.loss_mask > 0) & torch.from_numpy(of_tokens).to(log_probs.device)
    difference = (log_probs - columns.rollout_log_probs)[trained].abs()
    return {"train/train_rollout_logprob_abs_diff": float(difference.sum() / max(1, len(difference)))}
