"""`MicroBatch`: some samples of a `TrainBatch`, packed into one row on the model's device."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.samples import TrainBatch
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.logit_rows import LogitRows
from slime_megatron.batch.mtp_inputs import HostMicroBatch, MtpRow, mtp_chunks, mtp_rows
from slime_megatron.batch.packing import PackedSequences, pack, pack_zigzag
from slime_megatron.batch.response_tokens import ResponseTokens
from slime_megatron.batch.routing import StepRouting, routed_tokens
from slime_megatron.batch.sampling_mask import SamplingMask
from slime_megatron.batch.trees.token_tree import TokenTree, predicting_rows
from slime_megatron.parallel.context_parallel import ZigZag
from slime_megatron.parallel.token_split import TokenSplit


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples, and the indices of their response tokens in the columns of the batch."""

    tokens: Tensor
    """int64 [1, t] ids of all samples, one tree after another; this rank's part of them."""
    packed: PackedSequences
    """Where each tree begins and ends."""
    responses: ResponseTokens
    """The R response tokens, sample after sample."""
    samples: Tensor
    """int64 [n] positions of the samples in the batch."""
    members: tuple[int, ...]
    """The same, on the host."""
    columns: Tensor
    """int64 [R] index of each response token in the batch's [T] columns."""
    offsets: Tensor
    """int64 [n + 1]: sample i owns the response tokens offsets[i]:offsets[i + 1]."""
    sample_of_token: Tensor
    """int64 [R]: which of the n samples a response token belongs to."""
    counted: bool = True
    """Whether it counts for the loss; one that does not only gives all data-parallel ranks as many micro-batches."""
    flops: int = 0
    """Floating point operations of its forward pass, on all ranks that share the model; 0 for one that does not count."""


#: The micro-batches of one optimizer step on this rank.
MicroBatches = Sequence[MicroBatch]


@dataclass(frozen=True, kw_only=True)
class BatchOnDevice:
    """What all micro-batches of a batch are made from."""

    batch: TrainBatch
    """The step's samples."""
    rotary: tuple[Tensor, Tensor]
    """Cosine and sine, on the model's device, for as many positions as the longest sample has tokens, plus
    `split.max_padding`."""
    vocab_size: int
    """Ids of the model."""
    split: TokenSplit
    """How ranks share a row; with context parallelism each tree is one sample."""
    needs: Collection[str] = ()
    """Optional fields of `TokenView` that estimator and loss read."""
    sampling_mask: SamplingMask | None = None
    """The ids that top-p and top-k left for each of the batch's response tokens; None without either."""
    flops: Callable[[TokenTree], int] = lambda _: 0
    """Counts the FLOPs of a tree's forward pass."""

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.rotary[0].device


def make_micro_batch(
    source: BatchOnDevice,
    trees: Sequence[TokenTree],
    *,
    counted: bool = True,
    routing: StepRouting | None = None,
    mtp_routing: Sequence[StepRouting] = (),
) -> MicroBatch:
    """Pack some trees of samples, those with the longest sample first.

    Args:
        source: the batch, and how the model takes it.
        trees: the samples.
        counted: whether it counts for the loss.
        routing: the optimizer step, as routers see it; None for a model without experts.
        mtp_routing: the same for each MTP layer that is trained.
    """
    batch, split, device = source.batch, source.split, source.device
    ordered = sorted(trees, key=lambda tree: (-max(tree.lengths), tree.members[0]))
    order = np.array([i for tree in ordered for i in tree.members], dtype=np.int64)
    tokens = np.concatenate([tree.ids(batch) for tree in ordered])
    lengths = batch.response_lengths[order]
    targets = _ranges(batch.offsets[order + 1] - lengths, batch.offsets[order + 1])
    row = (_whole_row if split.context is None else _context_row)(ordered, source.rotary, split)
    places, packed, _ = row
    if routing is not None:
        own = split.own_part(places)
        packed.routed = routed_tokens(ordered, own, routing, counted=counted, device=device)
    host = HostMicroBatch(batch, ordered, targets, counted)
    columns = _ranges(batch.response_offsets[order], batch.response_offsets[order + 1])
    return MicroBatch(
        tokens=upload(np.where(places < 0, 0, tokens[places]).astype(np.int64)[None], device),
        packed=packed,
        responses=_response_tokens(source, host, row, columns, mtp_routing),
        samples=upload(order, device),
        members=tuple(order.tolist()),
        columns=upload(columns, device),
        offsets=upload(np.concatenate([[0], np.cumsum(lengths)]), device),
        sample_of_token=upload(np.repeat(np.arange(len(order)), lengths), device),
        counted=counted,
        flops=sum(map(source.flops, ordered)) if counted else 0,
    )


def _response_tokens(
    source: BatchOnDevice,
    host: HostMicroBatch,
    row: _Row,
    columns: NDArray[np.int64],
    mtp_routing: Sequence[StepRouting],
) -> ResponseTokens:
    """Return the response tokens whose log-probs this rank's part of the row predicts."""
    batch, context, device = source.batch, source.split.context, source.device
    rows = row[2][predicting_rows(host.trees)]
    places = np.flatnonzero(rows >= 0)
    mask = source.sampling_mask
    rows, targets, repeats = rows[places], batch.tokens[host.targets[places]].astype(np.int64), None
    shares = any(shared for tree in host.trees for shared in tree.shared)
    if shares and mask is None:  # masks may differ where tokens are shared: only one sample drew them
        rows, targets, repeats = _each_once(rows, targets)
    return ResponseTokens(
        rows=upload(rows, device),
        targets=upload(targets, device),
        repeats=None if repeats is None else upload(repeats, device),
        temperature=batch.temperature,
        with_entropy="entropy" in source.needs,
        with_sum_pi_squared="sum_pi_squared" in source.needs,
        logits=LogitRows.of(batch, host.trees, source.needs, row_tokens=len(row[0]), device=device),
        vocab_size=source.vocab_size,
        n_tokens=len(host.targets),
        places=None if context is None else upload(places, device),
        context=context,
        sampling_mask=mask and mask.select(columns[places], device),
        mtp_rows=_mtp_rows(host, mtp_routing, row, source.rotary, source.split),
    )


def _each_once(
    rows: NDArray[np.int64], targets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
    """Return rows and targets without what several samples share, and which of them each was; None where nothing is."""
    order = np.lexsort((targets, rows))
    ordered = np.stack((rows[order], targets[order]))
    is_new = np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))
    if is_new.all():
        return rows, targets, None
    repeats = np.empty(len(order), dtype=np.int64)
    repeats[order] = np.cumsum(is_new) - 1
    return ordered[0, is_new], ordered[1, is_new], repeats


def _mtp_rows(
    host: HostMicroBatch,
    routing: Sequence[StepRouting],
    row: _Row,
    rotary: tuple[Tensor, Tensor],
    split: TokenSplit,
) -> tuple[MtpRow, ...]:
    """Return the row of each MTP layer."""
    if split.context is None:
        return mtp_rows(host, routing, rotary, split)
    source, packed, own_row = row
    return mtp_chunks(host, routing, packed, split, source=source, own_row=own_row, device=rotary[0].device)


#: (index in the whole packed row of each of this rank's tokens, -1 for padding; what attention needs; index in this rank's
#: row of each token of the whole packed row, -1 where another rank has it).
_Row = tuple[NDArray[np.int64], PackedSequences, NDArray[np.int64]]


def _whole_row(trees: Sequence[TokenTree], rotary: tuple[Tensor, Tensor], split: TokenSplit) -> _Row:
    """Return the whole row, padded at its end to a multiple of `split.multiple` tokens by one more sequence."""
    n_tokens = sum(tree.n_tokens for tree in trees)
    padding = -n_tokens % split.multiple
    source = np.concatenate([np.arange(n_tokens), np.full(padding, -1)])
    packed = pack([*trees, TokenTree.of_prompt(padding)] if padding else trees, rotary)
    return source, packed, np.arange(n_tokens)


def _context_row(trees: Sequence[TokenTree], rotary: tuple[Tensor, Tensor], split: TokenSplit) -> _Row:
    """Return this context-parallel rank's chunks of each sequence, and of a sequence of padding if one is needed."""
    assert split.context is not None
    lengths = [tree.n_tokens for tree in trees]
    n_tokens = sum(lengths)
    unpadded = sum(2 * chunk for chunk in ZigZag.of(lengths, split.context).chunks)
    padding = -unpadded % math.lcm(2, split.multiple) * split.context.size()
    zigzag = ZigZag.of([*lengths, padding] if padding else lengths, split.context)
    size = sum(zigzag.padded)
    starts = np.cumsum([0, *zigzag.padded])[: len(lengths)]
    place_of_token = _ranges(starts, starts + np.array(lengths))
    own = zigzag.own_tokens()
    own_row = _scattered(np.arange(len(own)), own, size)[place_of_token]
    source = _scattered(np.arange(n_tokens), place_of_token, size)[own]
    return source, pack_zigzag(zigzag, rotary), own_row


def _scattered(values: NDArray[np.int64], places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return an array of `size` entries with `values` at `places`, -1 elsewhere."""
    whole = np.full(size, -1, dtype=np.int64)
    whole[places] = values
    return whole


def _ranges(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenated ranges [start, stop)."""
    return np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
