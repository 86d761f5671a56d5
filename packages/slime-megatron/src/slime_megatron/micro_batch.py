"""A micro-batch: some samples of a `TrainBatch`, packed, on the model's device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from slime_core.batch import TrainBatch
from torch import Tensor

from slime_megatron.context import ZigZag
from slime_megatron.model import ResponseTokens
from slime_megatron.mtp_rows import FurtherRow, HostRow, further_chunks, further_rows
from slime_megatron.nuclei import Nuclei
from slime_megatron.packed import Family, PackedSequences, pack, pack_zigzag
from slime_megatron.prefix import family_of, family_tokens, predicting_rows
from slime_megatron.routed import StepRouting, routed_tokens


@dataclass(frozen=True)
class RowCut:
    """How the ranks of one model share the tokens of a packed row."""

    context: dist.ProcessGroup | None = None
    """Ranks that have a zigzag part of each sequence; None where there is no context parallelism."""
    multiple: int = 1
    """A rank's tokens must be a multiple of this: the tensor-parallel ranks that share them (sequence parallelism)."""
    part: int = 0
    """Which of so many equal parts this rank has."""

    def own_part(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the part of a row that this rank has outside of matrices that are shared."""
        size = len(row) // self.multiple
        return row[self.part * size : (self.part + 1) * size]

    @property
    def most_padding(self) -> int:
        """Bound of the tokens by which a sequence grows, and of those of a sequence that is padding."""
        return self.multiple * (1 if self.context is None else 2 * self.context.size())


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples, and where their response tokens belong in the columns of the batch."""

    tokens: Tensor
    """int64 [1, t] ids of all samples, one family after another; this rank's part of them."""
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
    counted: bool = True
    """Whether it counts for the loss; another one is there so that all data-parallel ranks have as many."""


def make_micro_batch(
    batch: TrainBatch,
    families: Sequence[Sequence[int]],
    *,
    rotary: tuple[Tensor, Tensor],
    vocab_size: int,
    cut: RowCut,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    counted: bool = True,
    routing: StepRouting | None = None,
    further: Sequence[StepRouting] = (),
    nuclei: Nuclei | None = None,
) -> MicroBatch:
    """Pack the samples of some families (see `prefix`), those with the longest sample first.

    Args:
        batch: the step's samples.
        families: their positions in it.
        rotary: cosine and sine of as many positions as the longest sample has tokens and `cut.most_padding`.
        vocab_size: ids of the model.
        cut: how ranks share the row; with context parallelism each family is one sample.
        with_entropy: whether entropies are wanted with the log-probs.
        with_sum_pi_squared: whether sums of squared probabilities are.
        counted: whether it counts for the loss.
        routing: what routers are told of the optimizer step; None for a model without experts.
        further: the same for each layer that is trained to predict further tokens.
        nuclei: the ids that the batch's response tokens were drawn from; None where they could have been any.
    """
    ordered = sorted(families, key=lambda members: (-max(batch.lengths[i] for i in members), members[0]))
    shapes = [family_of(batch, members) for members in ordered]
    order = np.array([i for members in ordered for i in members], dtype=np.int64)
    device = rotary[0].device
    tokens = np.concatenate([family_tokens(batch, members) for members in ordered])
    targets = _ranges(batch.offsets[order + 1] - batch.response_lengths[order], batch.offsets[order + 1])
    response_lengths = batch.response_lengths[order]
    row = (_whole_row if cut.context is None else _context_row)(len(tokens), shapes, rotary, cut)
    source, packed, own_row = row
    rows = own_row[predicting_rows(shapes)]
    places = np.flatnonzero(rows >= 0)
    host = HostRow(batch, ordered, shapes, targets, counted)
    columns = torch.from_numpy(_ranges(batch.response_offsets[order], batch.response_offsets[order + 1]))
    if routing is not None:
        own = cut.own_part(source)
        packed.routed = routed_tokens(shapes, ordered, own, routing, counted=counted, device=device)
    return MicroBatch(
        tokens=torch.from_numpy(np.where(source < 0, 0, tokens[source]).astype(np.int64))[None].to(device),
        packed=packed,
        responses=ResponseTokens(
            rows=torch.from_numpy(rows[places]).to(device),
            targets=torch.from_numpy(batch.tokens[targets[places]].astype(np.int64)).to(device),
            temperature=batch.temperature,
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
            vocab_size=vocab_size,
            n_tokens=int(response_lengths.sum()),
            places=None if cut.context is None else torch.from_numpy(places).to(device),
            context=cut.context,
            nuclei=nuclei and nuclei.of(columns[places], device),
            further=_further(host, further, row, rotary, cut),
        ),
        samples=torch.from_numpy(order).to(device),
        columns=columns.to(device),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(response_lengths)])).to(device),
        sample_of_token=torch.from_numpy(np.repeat(np.arange(len(order)), response_lengths)).to(device),
        counted=counted,
    )


def _further(
    host: HostRow, routing: Sequence[StepRouting], row: _Row, rotary: tuple[Tensor, Tensor], cut: RowCut
) -> tuple[FurtherRow, ...]:
    """Return the row of each layer that predicts further tokens."""
    if cut.context is None:
        return further_rows(host, routing, rotary, cut)
    source, packed, own_row = row
    return further_chunks(host, routing, packed, cut, source=source, own_row=own_row, device=rotary[0].device)


#: The token of the packed row that each of a rank's is, -1 for padding; what attention needs; which of a rank's each token
#: of the packed row is, -1 where it is another's.
_Row = tuple[NDArray[np.int64], PackedSequences, NDArray[np.int64]]


def _whole_row(n_tokens: int, shapes: list[Family], rotary: tuple[Tensor, Tensor], cut: RowCut) -> _Row:
    """Return the row as it is, with a sequence of padding at its end if its tokens are no multiple."""
    padding = -n_tokens % cut.multiple
    source = np.concatenate([np.arange(n_tokens), np.full(padding, -1)])
    packed = pack([*shapes, Family(padding, ())] if padding else shapes, rotary)
    return source, packed, np.arange(n_tokens)


def _context_row(n_tokens: int, shapes: list[Family], rotary: tuple[Tensor, Tensor], cut: RowCut) -> _Row:
    """Return this context-parallel rank's chunks of each sequence, and of one of padding if need be."""
    assert cut.context is not None
    lengths = [shape.n_tokens for shape in shapes]
    unpadded = sum(2 * chunk for chunk in ZigZag.of(lengths, cut.context).chunks)
    padding = -unpadded % math.lcm(2, cut.multiple) * cut.context.size()
    zigzag = ZigZag.of([*lengths, padding] if padding else lengths, cut.context)
    size = sum(zigzag.padded)
    starts = np.cumsum([0, *zigzag.padded])[: len(lengths)]
    place_of_token = _ranges(starts, starts + np.array(lengths))
    own = zigzag.own_tokens().numpy()
    own_row = _scattered(np.arange(len(own)), own, size)[place_of_token]
    source = _scattered(np.arange(n_tokens), place_of_token, size)[own]
    return source, pack_zigzag(zigzag, rotary), own_row


def _scattered(values: NDArray[np.int64], places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return `values` at `places` of an array of `size` entries, -1 elsewhere."""
    whole = np.full(size, -1, dtype=np.int64)
    whole[places] = values
    return whole


def _ranges(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenated ranges [start, stop)."""
    return np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
