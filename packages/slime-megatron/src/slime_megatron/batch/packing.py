"""`PackedSequences`: prompt groups packed into one row of tokens, and the padded batches in which attention sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from slime_models.upload import upload
from torch import Tensor

from slime_megatron.batch.prompt_groups import PromptGroup
from slime_megatron.batch.routing import RoutedTokens
from slime_megatron.batch.variable_lengths import VariableLengths
from slime_megatron.parallel.context_parallel import ZigZag

#: Sequences are padded to the longest of their batch, which takes only those of at least this share of its length.
_LEAST_FILL = 0.75


@dataclass(frozen=True)
class PaddedPrefixes:
    """Prefixes, and whole sequences that share nothing, of similar length, padded on the right to one batch."""

    size: int
    """Number of sequences."""
    length: int
    """Tokens of the longest."""

    @property
    def n_slots(self) -> int:
        """Slots of the batch."""
        return self.size * self.length


@dataclass(frozen=True)
class PaddedSuffixes:
    """Suffixes of similar length, whose prefixes have one length, padded on the right to one batch.

    The prefixes are consecutive rows of one batch of `PackedSequences.prefixes`, and each has as many suffixes here.
    """

    batch: int
    """Index of that batch of prefixes."""
    first: int
    """Row of the first prefix in it."""
    n_prefixes: int
    """Number of prefixes."""
    prefix_length: int
    """Tokens of each prefix."""
    size: int
    """Suffixes of each prefix."""
    length: int
    """Tokens of the longest suffix."""

    @property
    def n_slots(self) -> int:
        """Slots of the batch."""
        return self.n_prefixes * self.size * self.length


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

    prefixes: tuple[PaddedPrefixes, ...] = ()
    """Batches of prefixes and of whole sequences, longest first."""
    suffixes: tuple[PaddedSuffixes, ...] = ()
    """Batches of the suffixes of shared prefixes; their slots come after those of `prefixes`."""
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
    def batches(self) -> tuple[PaddedPrefixes | PaddedSuffixes, ...]:
        """All padded batches, in the order of their slots."""
        return (*self.prefixes, *self.suffixes)

    @property
    def n_slots(self) -> int:
        """Slots of all padded batches, or this rank's tokens under context parallelism."""
        if self.zigzag is not None:
            return self.n_tokens
        return sum(batch.n_slots for batch in self.batches)


def pack(groups: Sequence[PromptGroup], cos_sin: tuple[Tensor, Tensor]) -> PackedSequences:
    """Describe prompt groups that follow one another in a packed row.

    Args:
        groups: at least one.
        cos_sin: [n, rotary_dim] each: cosine and sine of the rotary angles of positions 0 to n - 1, on the
            device of the model; n is at least the longest sequence.
    """
    cos, sin = cos_sin
    device = cos.device
    positions = upload(np.concatenate([_positions(group) for group in groups]), device)
    ends = _ends([group.n_tokens for group in groups], device)
    longest = max(group.prefix + max(group.suffixes, default=0) for group in groups)
    prefixes, suffixes, tokens = _batches(_parts(groups))
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        prefixes=prefixes,
        suffixes=suffixes,
        padding_map=_map_tokens(tokens, len(positions), device),
        lengths=VariableLengths.of(groups, device) if device.type == "cuda" and cos.itemsize == 2 else None,
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


def _positions(group: PromptGroup) -> NDArray[np.int64]:
    """Return the position of each packed token of a group in its own sequence."""
    suffixes = [np.arange(group.prefix, group.prefix + n) for n in group.suffixes]
    return np.concatenate([np.arange(group.prefix), *suffixes])


@dataclass(frozen=True)
class _Part:
    """A group as ranges of packed tokens: a prefix, and runs of suffixes of similar length."""

    prefix: range
    runs: tuple[tuple[range, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key: longest first, groups of the same shape together."""
        return (-len(self.prefix), *(-len(run) for run in self.runs))


def _parts(groups: Iterable[PromptGroup]) -> list[_Part]:
    """Divide each group into its prefix and its suffixes; a prompt that is not shared is one sequence with its response."""
    parts = []
    start = 0
    for group in groups:
        prefix = range(start, start := start + group.prefix)
        suffixes = []
        for n in group.suffixes:
            suffixes.append(range(start, start := start + n))
        suffixes = sorted((suffix for suffix in suffixes if suffix), key=lambda suffix: -len(suffix))
        if len(suffixes) == 1 and suffixes[0].start == prefix.stop:
            prefix, suffixes = range(prefix.start, suffixes[0].stop), []
        lengths = [len(prefix) + len(suffix) for suffix in suffixes]
        parts.append(_Part(prefix, tuple(tuple(suffixes[i] for i in run) for run in _alike(lengths))))
    return sorted(parts, key=lambda part: part.order)


def _alike(lengths: Sequence[int]) -> list[range]:
    """Divide descending lengths into runs of similar length."""
    runs: list[range] = []
    for i, length in enumerate(lengths):
        if runs and length >= _LEAST_FILL * lengths[runs[-1].start]:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


def _batches(
    parts: Sequence[_Part],
) -> tuple[tuple[PaddedPrefixes, ...], tuple[PaddedSuffixes, ...], list[int]]:
    """Return the batches of prefixes and suffixes, and the packed token of each slot, -1 for padding."""
    prefixes: list[PaddedPrefixes] = []
    suffixes: list[PaddedSuffixes] = []
    prefix_tokens: list[int] = []
    suffix_tokens: list[int] = []
    for rows in _alike([len(part.prefix) for part in parts]):
        batch = [parts[i] for i in rows]
        prefix_tokens += _padded([part.prefix for part in batch], length=len(batch[0].prefix))
        prefixes.append(PaddedPrefixes(len(batch), len(batch[0].prefix)))
        first = 0
        for order, alike in groupby(batch, key=lambda part: part.order):
            members = list(alike)
            for runs in zip(*(part.runs for part in members), strict=True):
                longest = max(len(run[0]) for run in runs)
                suffix_tokens += _padded([suffix for run in runs for suffix in run], length=longest)
                suffixes.append(
                    PaddedSuffixes(len(prefixes) - 1, first, len(members), -order[0], len(runs[0]), longest)
                )
            first += len(members)
    return tuple(prefixes), tuple(suffixes), prefix_tokens + suffix_tokens


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
