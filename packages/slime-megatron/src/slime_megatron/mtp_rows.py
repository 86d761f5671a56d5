"""What layers that predict further tokens see of a micro-batch.

The layer of depth k, from 1, takes at position j of a sample what the depth before (the decoder, for k = 1) made there and
the embedding of token j + k, and predicts token j + k + 1. Its loss is on response tokens, as the policy's is: with a prompt
of m tokens the first of them is predicted at position m - k - 1, the last at T - k - 2 of T.

Source: arXiv 2412.19437, equations 21 to 25.

A prompt that samples share stands once, without its last k tokens: those positions see what follows the prompt, so each
sample has its own copy of them. With prompts of m - k tokens instead of m, a depth's row is then cut as the decoder's is:
the same continuations, the same place of each prediction in it. Samples whose prompt has no more than k tokens are left out
at depth k: nothing predicts their first response token there.

Where context parallelism cuts sequences, no prompt is shared, and every depth keeps the decoder's row: what stands at the
end of a sample, beyond its predictions, is seen by nobody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.batch import TrainBatch
from torch import Tensor

from slime_megatron.packed import Family, PackedSequences, pack
from slime_megatron.prefix import family_tokens, predicting_rows, prompt_length
from slime_megatron.routed import StepRouting, routed_tokens

if TYPE_CHECKING:
    from slime_megatron.micro_batch import RowCut


@dataclass(frozen=True)
class FurtherRow:
    """The row of one depth, t tokens, of which r predict response tokens of this rank."""

    rows: Tensor | None
    """int64 [t]: which token of the row of the depth before each of them is; None where both rows are the same."""
    tokens: Tensor
    """int64 [1, t]: ids of the tokens k places on."""
    packed: PackedSequences
    """Where each family begins and ends."""
    predicting: Tensor
    """int64 [r]: tokens of the row at which response tokens are predicted."""
    targets: Tensor
    """int64 [r]: ids of the response tokens."""
    places: Tensor
    """int64 [r]: which of the micro-batch's R response tokens they are."""


@dataclass(frozen=True)
class HostRow:
    """A micro-batch on the host: its families in the order of its row."""

    batch: TrainBatch
    families: Sequence[Sequence[int]]
    """Positions of the samples in the batch."""
    shapes: Sequence[Family]
    """Lengths of the families in the decoder's row."""
    targets: NDArray[np.int64]
    """[R]: where the ids of the response tokens are in the batch's tokens."""
    counted: bool
    """Whether the micro-batch counts for the loss."""

    def taking_part(self, depth: int) -> NDArray[np.bool_]:
        """Return [R]: whether each response token is of a sample that a depth predicts."""
        own = [
            (prompt_length(self.batch, i) > depth, int(self.batch.response_lengths[i]))
            for members in self.families
            for i in members
        ]
        return np.repeat([part for part, _ in own], [n for _, n in own])


def further_rows(
    host: HostRow,
    routing: Sequence[StepRouting],
    rotary: tuple[Tensor, Tensor],
    cut: RowCut,
) -> tuple[FurtherRow, ...]:
    """Return the row of each depth, where no context parallelism cuts sequences.

    Args:
        host: the micro-batch.
        routing: what routers of each depth are told of the optimizer step.
        rotary: cosine and sine of as many positions as the longest sample has tokens.
        cut: how tensor-parallel ranks share a row.
    """
    batch, device = host.batch, rotary[0].device
    before = list(zip(host.families, host.shapes, strict=True))
    found = []
    for depth, step in enumerate(routing, start=1):
        rows = [np.zeros(0, dtype=np.int64)]
        own, ids, start = [], [np.zeros(0, dtype=np.int32)], 0
        for family, shape in before:
            if shape.prompt > 1:
                rows.append(_rows_of_depth_before(shape, start))
                own.append((family, dataclasses.replace(shape, prompt=shape.prompt - 1)))
                ids.append(family_tokens(batch, family)[depth:])
            start += shape.n_tokens
        n_tokens = sum(shape.n_tokens for _, shape in own)
        padding = -n_tokens % cut.multiple if own else cut.multiple
        shapes = [shape for _, shape in own]
        packed_shapes = [*shapes, Family(padding, ())] if padding else shapes
        filled = np.zeros(padding, dtype=np.int64)
        packed = pack(packed_shapes, rotary)
        packed.routed = routed_tokens(
            packed_shapes,
            [family for family, _ in own],
            cut.own_part(np.arange(n_tokens + padding)),
            step,
            counted=host.counted,
            device=device,
        )
        places = np.flatnonzero(host.taking_part(depth))
        found.append(
            FurtherRow(
                rows=torch.from_numpy(np.concatenate([*rows, filled])).to(device),
                tokens=torch.from_numpy(np.concatenate([*ids, filled]).astype(np.int64))[None].to(device),
                packed=packed,
                predicting=torch.from_numpy(predicting_rows(shapes)).to(device),
                targets=_ids(batch, host.targets[places], device),
                places=torch.from_numpy(places).to(device),
            )
        )
        before = own
    return tuple(found)


def further_chunks(
    host: HostRow,
    routing: Sequence[StepRouting],
    packed: PackedSequences,
    cut: RowCut,
    *,
    source: NDArray[np.int64],
    own_row: NDArray[np.int64],
    device: torch.device,
) -> tuple[FurtherRow, ...]:
    """Return the row of each depth on a context-parallel rank: its chunks of the decoder's row.

    Args:
        host: the micro-batch; each family is one sample.
        routing: what routers of each depth are told of the optimizer step.
        packed: the decoder's.
        cut: how ranks share a row.
        source: [t] which token of the whole row each of this rank's is, -1 for padding.
        own_row: the token of this rank's row that each of the whole row is, -1 where it is another rank's.
        device: of the model.
    """
    batch = host.batch
    predicting = predicting_rows(host.shapes)
    found = []
    for depth, step in enumerate(routing, start=1):
        ids, seen = _ahead(host, depth)
        part = host.taking_part(depth)
        rows = np.where(part, own_row[np.where(part, predicting - depth, 0)], -1)
        places = np.flatnonzero(rows >= 0)
        own_source = cut.own_part(np.where(seen[source], source, -1))
        routed = routed_tokens(
            host.shapes, host.families, own_source, step, counted=host.counted, device=device
        )
        found.append(
            FurtherRow(
                rows=None,
                tokens=torch.from_numpy(np.where(source < 0, 0, ids[source]))[None].to(device),
                packed=dataclasses.replace(packed, routed=routed),
                predicting=torch.from_numpy(rows[places]).to(device),
                targets=_ids(batch, host.targets[places], device),
                places=torch.from_numpy(places).to(device),
            )
        )
    return tuple(found)


def _rows_of_depth_before(shape: Family, start: int) -> NDArray[np.int64]:
    """Return which tokens of a row, where a family begins at `start`, those of the next depth's are.

    The prompt without its last token; then for each continuation that token and its own but the last.
    """
    last = start + shape.prompt - 1
    starts = last + 1 + np.cumsum([0, *shape.continuations])[:-1]
    tails = [
        np.concatenate([[last], np.arange(first, first + n - 1)])
        for first, n in zip(starts, shape.continuations, strict=True)
        if n
    ]
    return np.concatenate([np.arange(start, last), *tails]).astype(np.int64)


def _ahead(host: HostRow, depth: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the id `depth` places after each token of the decoder's row, and whether the token's position is used."""
    batch, ids, seen = host.batch, [], []
    for i in (i for family in host.families for i in family):
        n = int(batch.lengths[i]) - 1
        tokens = batch.tokens[batch.offsets[i] + depth : batch.offsets[i + 1]][:n]
        ids.append(np.pad(tokens.astype(np.int64), (0, n - len(tokens))))
        seen.append((np.arange(n) < n - depth) & (prompt_length(batch, i) > depth))
    return np.concatenate(ids), np.concatenate(seen)


def _ids(batch: TrainBatch, places: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(batch.tokens[places].astype(np.int64)).to(device)
