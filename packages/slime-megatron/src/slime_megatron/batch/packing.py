"""`PackedSequences`: trees of samples packed into one row of tokens, and the padded batches in which attention sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.routing import RoutedTokens
from slime_megatron.batch.trees.segments import Segment, row_segments
from slime_megatron.batch.trees.token_tree import TokenTree
from slime_megatron.batch.variable_lengths import VariableLengths
from slime_megatron.parallel.context_parallel import ZigZag

#: Sequences are padded to the longest of their batch, which takes only those of at least this share of its length.
_LEAST_FILL = 0.75


@dataclass(frozen=True)
class PaddedSegments:
    """Segments of similar length that follow as many tokens each, padded on the right to one batch.

    What they follow are consecutive rows of one batch, and each of these has as many segments here; or nothing, where sequences
    begin.
    """

    size: int
    """Segments for each row that they follow."""
    length: int
    """Tokens of the longest."""
    parent: int | None = None
    """Index of the batch that they follow; None where sequences begin."""
    first: int = 0
    """The first row of that batch that has segments here."""
    n_parents: int = 1
    """Number of such rows; 1 where sequences begin."""
    before: int = 0
    """Tokens before each: those of the row that it follows, and what that one follows."""

    @property
    def n_rows(self) -> int:
        """Segments in the batch."""
        return self.n_parents * self.size

    @property
    def n_slots(self) -> int:
        """Slots of the batch."""
        return self.n_rows * self.length


@dataclass(frozen=True)
class PaddingMap:
    """Which token of the packed row is in which slot of the padded batches."""

    tokens: Tensor
    """int64 [slots]: the token of each slot; any token where the slot is padding."""
    slots: Tensor
    """int64 [t]: the slot of each token."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of a thd batch, with what our attention reads besides (see `attention`)."""

    batches: tuple[PaddedSegments, ...] = ()
    """Batches of segments: first those that sequences begin with, longest first, then what follows them, and so on."""
    padding_map: PaddingMap | None = None
    """None where the padded batches, one after another, are the packed row itself."""
    zigzag: ZigZag | None = None
    """This context-parallel rank's chunks of the sequences; None without context parallelism."""
    n_tokens: int = 0
    """Tokens of the row that this rank has."""
    cos: Tensor | None = None
    """[t, 1, rotary_dim] cosine of each token's rotary angles, in the compute dtype."""
    sin: Tensor | None = None
    """[t, 1, rotary_dim] sine of the same."""
    lengths: VariableLengths | None = None
    """For attention by one call on CUDA; None on a CPU, in float32, and under context parallelism."""
    routed: RoutedTokens | None = None
    """What routers read; None for a model without experts."""

    @property
    def n_slots(self) -> int:
        """Slots of all padded batches, or this rank's tokens under context parallelism."""
        if self.zigzag is not None:
            return self.n_tokens
        return sum(batch.n_slots for batch in self.batches)


def pack(trees: Sequence[TokenTree], cos_sin: tuple[Tensor, Tensor]) -> PackedSequences:
    """Describe trees of samples that follow one another in a packed row.

    Args:
        trees: at least one.
        cos_sin: [n, rotary_dim] each: cosine and sine of the rotary angles of positions 0 to n - 1, on the
            device of the model; n is at least the longest sequence.
    """
    cos, sin = cos_sin
    device = cos.device
    spans = [span for tree in trees for span in tree.spans]
    positions = upload(np.concatenate([np.arange(*span) for span in spans]), device)
    ends = _ends([tree.n_tokens for tree in trees], device)
    longest = max(stop for _, stop in spans)
    segments = row_segments(trees)
    batches, tokens = _batches(segments)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        batches=batches,
        padding_map=_map_tokens(tokens, len(positions), device),
        lengths=VariableLengths.of(segments, device) if device.type == "cuda" and cos.itemsize == 2 else None,
        n_tokens=len(positions),
        cos=cos[positions][:, None],
        sin=sin[positions][:, None],
    )


def pack_zigzag(zigzag: ZigZag, cos_sin: tuple[Tensor, Tensor]) -> PackedSequences:
    """Describe this rank's chunks of sequences; see `pack` for `cos_sin`."""
    cos, sin = cos_sin
    ends = _ends(zigzag.padded, cos.device)
    in_sequence = np.concatenate([np.arange(length) for length in zigzag.padded])
    positions = upload(in_sequence[zigzag.own_tokens()], cos.device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(zigzag.padded),
        max_seqlen_kv=max(zigzag.padded),
        zigzag=zigzag,
        n_tokens=len(positions),
        cos=cos[positions][:, None],
        sin=sin[positions][:, None],
    )


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return int32 [n + 1]: where each sequence of a row begins, and where the last one ends."""
    return upload(np.cumsum([0, *lengths], dtype=np.int32), device)


def _alike(lengths: Sequence[int]) -> list[range]:
    """Divide descending lengths into runs of similar length."""
    runs: list[range] = []
    for i, length in enumerate(lengths):
        if runs and length >= _LEAST_FILL * lengths[runs[-1].start]:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


def _batches(segments: Sequence[Segment]) -> tuple[tuple[PaddedSegments, ...], list[int]]:
    """Return the batches of segments, given by rows, and the packed token of each slot, -1 for padding."""
    followed: dict[Segment, list[list[Segment]]] = {}

    def order(segment: Segment) -> tuple[int, ...]:
        """Return a sort key: longest first, those whose children are divided alike together."""
        return (-len(segment.rows), *(-len(run) for run in followed[segment]))

    def runs_of(siblings: Iterable[Segment]) -> list[list[Segment]]:
        """Divide segments that follow as many tokens into runs of similar length, of all the tokens up to their ends."""
        ordered = sorted(siblings, key=order)
        return [[ordered[i] for i in run] for run in _alike([segment.end for segment in ordered])]

    for segment in reversed(segments):  # children before what they follow
        followed[segment] = runs_of(segment.children)
    rows = runs_of(segment for segment in segments if segment.parent is None)
    batches = [PaddedSegments(len(batch), len(batch[0].rows)) for batch in rows]
    for number, batch in enumerate(rows):  # which grows by what follows
        first = 0
        for _, same in groupby(batch, key=order):
            parents = list(same)
            for runs in zip(*(followed[parent] for parent in parents), strict=True):
                longest = max(len(run[0].rows) for run in runs)
                batches.append(
                    PaddedSegments(len(runs[0]), longest, number, first, len(parents), parents[0].end)
                )
                rows.append([segment for run in runs for segment in run])
            first += len(parents)
    slots = [
        token
        for shape, batch in zip(batches, rows, strict=True)
        for token in _padded((segment.rows for segment in batch), length=shape.length)
    ]
    return tuple(batches), slots


def _padded(ranges: Iterable[range], *, length: int) -> list[int]:
    return [token for r in ranges for token in (*r, *([-1] * (length - len(r))))]


def _map_tokens(tokens: Sequence[int], n_tokens: int, device: torch.device) -> PaddingMap | None:
    """Return the map of tokens and slots, None where each token's slot has its own number."""
    of_slot = np.array(tokens, dtype=np.int64)
    if np.array_equal(of_slot, np.arange(n_tokens)):
        return None
    slots = np.empty(n_tokens, dtype=np.int64)
    used = np.flatnonzero(of_slot >= 0)
    slots[of_slot[used]] = used
    return PaddingMap(tokens=upload(np.maximum(of_slot, 0), device), slots=upload(slots, device))
