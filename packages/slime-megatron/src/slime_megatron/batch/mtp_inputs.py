"""Inputs of the multi-token prediction (MTP) layers: one packed row of tokens for each depth.

The MTP layer of depth k (from 1) takes, at position j of a sample, the hidden state of the depth before (of the decoder for
k = 1) and the embedding of token j + k, and predicts token j + k + 1. Its loss is on response tokens, as the policy's is: for
a prompt of m tokens and a sample of T tokens, the first response token is predicted at position m - k - 1 and the last at
position T - k - 2.

Source: arXiv 2412.19437, equations 21 to 25.

A shared prefix is in the row once, without its last k tokens: the inputs at those positions include response tokens, which
differ from sample to sample, so each sample has its own copy of them. With a prefix of m - k tokens in place of m, the row of
a depth is packed like the decoder's: same suffixes, and predictions at the same positions within them. A sample whose prompt
has k tokens or fewer is left out at depth k, because no position there predicts its first response token.

Under context parallelism no prefix is shared and every depth uses the decoder's row; positions after a sample's last
prediction are computed, but nothing reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.samples import TrainBatch
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.packing import PackedSequences, pack
from slime_megatron.batch.prompt_groups import PromptGroup, group_tokens, predicting_rows, prompt_length
from slime_megatron.batch.routing import StepRouting, routed_tokens
from slime_megatron.parallel.token_split import TokenSplit


@dataclass(frozen=True)
class MtpRow:
    """The row of one depth: t tokens, of which r predict response tokens of this rank."""

    rows: Tensor | None
    """int64 [t]: index of each token in the row of the depth before; None where both rows are the same."""
    tokens: Tensor
    """int64 [1, t]: ids of the tokens k positions ahead, whose embeddings the layer takes."""
    packed: PackedSequences
    """Where each group begins and ends."""
    predicting: Tensor
    """int64 [r]: positions in the row at which response tokens are predicted."""
    targets: Tensor
    """int64 [r]: ids of the response tokens."""
    places: Tensor
    """int64 [r]: index of each among the micro-batch's R response tokens."""


@dataclass(frozen=True)
class HostMicroBatch:
    """A micro-batch on the host: its prompt groups in the order of the packed row."""

    batch: TrainBatch
    groups: Sequence[Sequence[int]]
    """Positions in the batch of the samples of each group."""
    shapes: Sequence[PromptGroup]
    """Lengths of each group in the decoder's row."""
    targets: NDArray[np.int64]
    """[R]: index of each response token in the batch's tokens."""
    counted: bool
    """Whether the micro-batch counts for the loss."""

    def is_predicted(self, depth: int) -> NDArray[np.bool_]:
        """Return [R]: whether each response token is of a sample whose prompt is long enough for this depth."""
        own = [
            (prompt_length(self.batch, i) > depth, int(self.batch.response_lengths[i]))
            for members in self.groups
            for i in members
        ]
        return np.repeat([part for part, _ in own], [n for _, n in own])


def mtp_rows(
    host: HostMicroBatch,
    routing: Sequence[StepRouting],
    rotary: tuple[Tensor, Tensor],
    split: TokenSplit,
) -> tuple[MtpRow, ...]:
    """Return the row of each depth, without context parallelism.

    Args:
        host: the micro-batch.
        routing: the optimizer step, as the routers of each depth see it.
        rotary: cosine and sine of as many positions as the longest sample has tokens.
        split: how tensor-parallel ranks share a row (sequence parallelism).
    """
    batch, device = host.batch, rotary[0].device
    before = list(zip(host.groups, host.shapes, strict=True))
    found = []
    for depth, step in enumerate(routing, start=1):
        rows = [np.zeros(0, dtype=np.int64)]
        own, ids, start = [], [np.zeros(0, dtype=np.int32)], 0
        for group, shape in before:
            if shape.prefix > 1:
                rows.append(_rows_of_depth_before(shape, start))
                own.append((group, dataclasses.replace(shape, prefix=shape.prefix - 1)))
                ids.append(group_tokens(batch, group)[depth:])
            start += shape.n_tokens
        n_tokens = sum(shape.n_tokens for _, shape in own)
        padding = -n_tokens % split.multiple if own else split.multiple
        shapes = [shape for _, shape in own]
        packed_shapes = [*shapes, PromptGroup(padding, ())] if padding else shapes
        filled = np.zeros(padding, dtype=np.int64)
        packed = pack(packed_shapes, rotary)
        packed.routed = routed_tokens(
            packed_shapes,
            [group for group, _ in own],
            split.own_part(np.arange(n_tokens + padding)),
            step,
            counted=host.counted,
            device=device,
        )
        places = np.flatnonzero(host.is_predicted(depth))
        found.append(
            MtpRow(
                rows=upload(np.concatenate([*rows, filled]), device),
                tokens=upload(np.concatenate([*ids, filled]).astype(np.int64)[None], device),
                packed=packed,
                predicting=upload(predicting_rows(shapes), device),
                targets=_ids(batch, host.targets[places], device),
                places=upload(places, device),
            )
        )
        before = own
    return tuple(found)


def mtp_chunks(
    host: HostMicroBatch,
    routing: Sequence[StepRouting],
    packed: PackedSequences,
    split: TokenSplit,
    *,
    source: NDArray[np.int64],
    own_row: NDArray[np.int64],
    device: torch.device,
) -> tuple[MtpRow, ...]:
    """Return the row of each depth on a context-parallel rank: its zigzag chunks of the decoder's row.

    Args:
        host: the micro-batch; each group is one sample.
        routing: the optimizer step, as the routers of each depth see it.
        packed: the decoder's.
        split: how ranks share a row.
        source: [t] index in the whole row of each of this rank's tokens, -1 for padding.
        own_row: index in this rank's row of each token of the whole row, -1 where another rank has it.
        device: of the model.
    """
    batch = host.batch
    predicting = predicting_rows(host.shapes)
    found = []
    for depth, step in enumerate(routing, start=1):
        ids, seen = _ahead(host, depth)
        part = host.is_predicted(depth)
        rows = np.where(part, own_row[np.where(part, predicting - depth, 0)], -1)
        places = np.flatnonzero(rows >= 0)
        own_source = split.own_part(np.where(seen[source], source, -1))
        routed = routed_tokens(
            host.shapes, host.groups, own_source, step, counted=host.counted, device=device
        )
        found.append(
            MtpRow(
                rows=None,
                tokens=upload(np.where(source < 0, 0, ids[source])[None], device),
                packed=dataclasses.replace(packed, routed=routed),
                predicting=upload(rows[places], device),
                targets=_ids(batch, host.targets[places], device),
                places=upload(places, device),
            )
        )
    return tuple(found)


def _rows_of_depth_before(shape: PromptGroup, start: int) -> NDArray[np.int64]:
    """Return the indices, in the row of the depth before, of the tokens of a group that begins there at `start`.

    They are the prefix without its last token; then, for each suffix, that token and the suffix without its last one.
    """
    last = start + shape.prefix - 1
    starts = last + 1 + np.cumsum([0, *shape.suffixes])[:-1]
    suffixes = [
        np.concatenate([[last], np.arange(first, first + n - 1)])
        for first, n in zip(starts, shape.suffixes, strict=True)
        if n
    ]
    rows: NDArray[np.int64] = np.concatenate([np.arange(start, last), *suffixes]).astype(np.int64)
    return rows


def _ahead(host: HostMicroBatch, depth: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the id `depth` positions ahead of each token of the decoder's row, and whether the position is used."""
    batch, ids, seen = host.batch, [], []
    for i in (i for group in host.groups for i in group):
        n = int(batch.lengths[i]) - 1
        tokens = batch.tokens[batch.offsets[i] + depth : batch.offsets[i + 1]][:n]
        ids.append(np.pad(tokens.astype(np.int64), (0, n - len(tokens))))
        seen.append((np.arange(n) < n - depth) & (prompt_length(batch, i) > depth))
    return np.concatenate(ids), np.concatenate(seen)


def _ids(batch: TrainBatch, places: NDArray[np.int64], device: torch.device) -> Tensor:
    return upload(batch.tokens[places].astype(np.int64), device)
