"""Metrics of a step besides its loss: forwarded tokens, padding, and the difference of the engine's log-probs from ours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.protocols import Metrics
from slime_core.run.log_prob_gate import MEAN, agreement
from slime_core.samples import TrainBatch
from torch import Tensor

from slime_megatron.batch.micro_batch import MicroBatches
from slime_megatron.batch.token_columns import TokenColumns


def forwarded(steps: Sequence[MicroBatches], n_ranks: int) -> dict[str, float]:
    """Return the tokens of all micro-batches, and the slots that attention computes for them, on so many ranks each."""
    packed = [micro.packed for step in steps for micro in step]
    numbers = {"tokens": sum(p.n_tokens for p in packed), "slots": sum(p.n_slots for p in packed)}
    return {name: float(n_ranks * number) for name, number in numbers.items()}


def mismatch(
    batch: TrainBatch,
    columns: TokenColumns,
    log_probs: Tensor | None,
    steps: Sequence[NDArray[np.int64]],
    *,
    by_own_weights: bool,
) -> Metrics:
    """Return the mean difference between the engine's log-probs and ours, over trainable tokens; nan where one of them is.

    And what the gate reads besides, see `slime_core.run.log_prob_gate`.

    Args:
        batch: the samples.
        columns: theirs.
        log_probs: ours [T], computed for the samples of `steps`.
        steps: optimizer steps of the batch.
        by_own_weights: whether ours are those of the weights that generated each token.
    """
    if columns.rollout_log_probs is None or log_probs is None:
        return {}
    in_steps = np.isin(np.arange(len(batch)), np.concatenate(steps))
    of_tokens = np.repeat(in_steps, batch.response_lengths)
    trained = (columns.loss_mask > 0) & torch.from_numpy(of_tokens).to(log_probs.device)
    apart = (log_probs - columns.rollout_log_probs).abs()
    difference = apart[trained]
    found = {MEAN: float(difference.sum() / max(1, len(difference)))}
    counted = trained.cpu().numpy()
    return found | agreement(batch, apart.cpu().numpy(), counted, by_own_weights=by_own_weights)
