"""A micro-batch: some samples of a `TrainBatch`, packed, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.batch import TrainBatch
from torch import Tensor

from slime_megatron.model import ResponseTokens
from slime_megatron.packed import PackedSequences, pack_sequences


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples, and where their response tokens belong in the columns of the batch."""

    tokens: Tensor
    """int64 [1, t] ids of all samples, one after another."""
    packed: PackedSequences
    """Where each sample begins and ends."""
    responses: ResponseTokens
    """The R response tokens, sample after sample."""
    samples: Tensor
    """int64 [n] positions of the samples in the batch."""
    columns: Tensor
    """int64 [R] place of each response token in the batch's [T] columns."""
    offsets: Tensor
    """int64 [n + 1]: sample i owns the response tokens offsets[i]:offsets[i + 1]."""
    sample_of_token: Tensor
    """int64 [R]: which of the n samples a response token belongs to."""


def make_micro_batch(
    batch: TrainBatch, samples: Sequence[int], *, rotary: tuple[Tensor, Tensor], with_entropy: bool = False
) -> MicroBatch:
    """Pack the samples at these positions, longest first.

    Args:
        batch: the step's samples.
        samples: positions in it.
        rotary: cosine and sine of at least as many positions as the longest sample has tokens.
        with_entropy: whether entropies are wanted with the log-probs.
    """
    order = np.array(sorted(samples, key=lambda i: (-batch.lengths[i], i)), dtype=np.int64)
    lengths, response_lengths = batch.lengths[order], batch.response_lengths[order]
    device = rotary[0].device
    tokens = np.concatenate([batch.tokens[batch.offsets[i] : batch.offsets[i + 1]] for i in order])
    ends = np.cumsum(lengths)
    positions = _ranges(ends - response_lengths, ends)
    return MicroBatch(
        tokens=torch.from_numpy(tokens.astype(np.int64))[None].to(device),
        packed=pack_sequences(lengths.tolist(), rotary),
        responses=ResponseTokens(
            rows=torch.from_numpy(positions - 1).to(device),
            targets=torch.from_numpy(tokens[positions].astype(np.int64)).to(device),
            temperature=batch.temperature,
            with_entropy=with_entropy,
        ),
        samples=torch.from_numpy(order).to(device),
        columns=torch.from_numpy(
            _ranges(batch.response_offsets[order], batch.response_offsets[order + 1])
        ).to(device),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(response_lengths)])).to(device),
        sample_of_token=torch.from_numpy(np.repeat(np.arange(len(order)), response_lengths)).to(device),
    )


def _ranges(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenated ranges [start, stop)."""
    return np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
