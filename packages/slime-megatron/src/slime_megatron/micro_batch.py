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
from slime_megatron.packed import Family, PackedSequences, pack
from slime_megatron.prefix import family_of, family_tokens


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples, and where their response tokens belong in the columns of the batch."""

    tokens: Tensor
    """int64 [1, t] ids of all samples, one family after another."""
    packed: PackedSequences
    """Where each family begins and ends."""
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
    batch: TrainBatch,
    families: Sequence[Sequence[int]],
    *,
    rotary: tuple[Tensor, Tensor],
    with_entropy: bool = False,
) -> MicroBatch:
    """Pack the samples of some families (see `prefix`), those with the longest sample first.

    Args:
        batch: the step's samples.
        families: their positions in it.
        rotary: cosine and sine of at least as many positions as the longest sample has tokens.
        with_entropy: whether entropies are wanted with the log-probs.
    """
    ordered = sorted(families, key=lambda members: (-max(batch.lengths[i] for i in members), members[0]))
    shapes = [family_of(batch, members) for members in ordered]
    order = np.array([i for members in ordered for i in members], dtype=np.int64)
    device = rotary[0].device
    tokens = np.concatenate([family_tokens(batch, members) for members in ordered])
    targets = _ranges(batch.offsets[order + 1] - batch.response_lengths[order], batch.offsets[order + 1])
    response_lengths = batch.response_lengths[order]
    return MicroBatch(
        tokens=torch.from_numpy(tokens.astype(np.int64))[None].to(device),
        packed=pack(shapes, rotary),
        responses=ResponseTokens(
            rows=torch.from_numpy(_predicting_rows(shapes)).to(device),
            targets=torch.from_numpy(batch.tokens[targets].astype(np.int64)).to(device),
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


def _predicting_rows(families: Sequence[Family]) -> NDArray[np.int64]:
    """Return the packed row before each response token: the prompt's last one, then the response's own but the last."""
    rows, start = [], 0
    for family in families:
        last = start + family.prompt - 1
        start += family.prompt
        for n in family.continuations:
            rows += [[last], np.arange(start, start + n)]
            start += n
    return np.concatenate(rows).astype(np.int64)


def _ranges(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenated ranges [start, stop)."""
    return np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
