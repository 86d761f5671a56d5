"""Packed sequences: many sequences in one row, tokens of a common prompt only once, and what attention needs for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime_megatron.context import ZigZag

if TYPE_CHECKING:
    from slime_megatron.routed import RoutedTokens

#: Sequences are padded to the longest of their batch; a batch holds those of at least this share of its length.
_LEAST_FILL = 0.75


@dataclass(frozen=True)
class Family:
    """A prompt, and the continuations that share it. In the packed row the prompt stands once, then each of them."""

    prompt: int
    """Tokens of the prompt, at least 1."""
    continuations: tuple[int, ...]
    """Tokens of each continuation; there may be none in one."""

    @property
    def n_tokens(self) -> int:
        """Tokens in the packed row."""
        return self.prompt + sum(self.continuations)


@dataclass(frozen=True)
class Stems:
    """Sequences of like length that begin at position 0, padded on the right to one batch."""

    size: int
    """Number of sequences."""
    length: int
    """Tokens of the longest."""

    @property
    def n_slots(self) -> int:
        """Slots of the batch."""
        return self.size * self.length


@dataclass(frozen=True)
class Tails:
    """Continuations of like length, of prompts of one length, padded on the right to one batch.

    The prompts are consecutive rows of one batch of stems, and each has the same number of continuations here.
    """

    stems: int
    """Which batch of stems holds the prompts."""
    first: int
    """Row of the first prompt in it."""
    prompts: int
    """Number of prompts."""
    prompt_length: int
    """Tokens of each prompt."""
    size: int
    """Continuations of each prompt."""
    length: int
    """Tokens of the longest continuation."""

    @property
    def n_slots(self) -> int:
        """Slots of the batch."""
        return self.prompts * self.size * self.length


@dataclass(frozen=True)
class Layout:
    """How the tokens of the packed row go into the slots of the padded batches, and come back."""

    tokens: Tensor
    """int64 [slots]: the token that goes into each slot; any, where a slot is padding."""
    slots: Tensor
    """int64 [t]: the slot of each token."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of a thd batch, with what our attention reads besides (see `attention`)."""

    stems: tuple[Stems, ...] = ()
    """Batches of whole sequences and of shared prompts, longest first."""
    tails: tuple[Tails, ...] = ()
    """Batches of what continues the shared prompts; their slots come after those of the stems."""
    layout: Layout | None = None
    """None where the padded batches are the packed row itself: nothing is padded or moved."""
    zigzag: ZigZag | None = None
    """Which chunks of the sequences are this rank's; None where it has all, in the batches above."""
    n_tokens: int = 0
    """Tokens of the row that this rank has."""
    cos: Tensor | None = None
    """[t, 1, rotary_dim] cosine of each token's rotary angles, in the compute dtype."""
    sin: Tensor | None = None
    """[t, 1, rotary_dim] sine of the same."""
    routed: RoutedTokens | None = None
    """What routers are told; None for a model without experts."""

    @property
    def n_slots(self) -> int:
        """Slots of all padded batches, or this rank's tokens where it has chunks."""
        if self.zigzag is not None:
            return self.n_tokens
        return sum(batch.n_slots for batch in (*self.stems, *self.tails))


def pack(families: Sequence[Family], cos_sin: tuple[Tensor, Tensor]) -> PackedSequences:
    """Describe families that lie one after another in a packed row.

    Args:
        families: at least one.
        cos_sin: [n, rotary_dim] each: cosine and sine of the rotary angles of positions 0 to n - 1, on the
            device of the model; n is at least the longest sequence.
    """
    cos, sin = cos_sin
    device = cos.device
    positions = torch.cat([_positions(family) for family in families]).to(device)
    ends = torch.tensor([0, *(family.n_tokens for family in families)]).cumsum(0)
    ends = ends.to(device=device, dtype=torch.int32)
    longest = max(family.prompt + max(family.continuations, default=0) for family in families)
    stems, tails, tokens = _batches(_parts(families))
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        stems=stems,
        tails=tails,
        layout=_layout(tokens, len(positions), device),
        n_tokens=len(positions),
        cos=cos[positions][:, None],
        sin=sin[positions][:, None],
    )


def pack_zigzag(zigzag: ZigZag, cos_sin: tuple[Tensor, Tensor]) -> PackedSequences:
    """Describe this rank's chunks of sequences; see `pack` for `cos_sin`."""
    cos, sin = cos_sin
    ends = torch.tensor([0, *zigzag.padded]).cumsum(0).to(device=cos.device, dtype=torch.int32)
    in_sequence = torch.cat([torch.arange(length) for length in zigzag.padded])
    positions = in_sequence[zigzag.own_tokens()].to(cos.device)
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


def _positions(family: Family) -> Tensor:
    """Return int64: the position of each packed token of a family in its own sequence."""
    tails = [torch.arange(family.prompt, family.prompt + n) for n in family.continuations]
    return torch.cat([torch.arange(family.prompt), *tails])


@dataclass(frozen=True)
class _Part:
    """A family as ranges of packed tokens: a stem, and runs of tails of like length."""

    stem: range
    runs: tuple[tuple[range, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Parts of equal order stand together; longest first."""
        return (-len(self.stem), *(-len(run) for run in self.runs))


def _parts(families: Iterable[Family]) -> list[_Part]:
    """Cut each family into its stem and its tails; a prompt that is not shared is one stem with what follows it."""
    parts = []
    start = 0
    for family in families:
        stem = range(start, start := start + family.prompt)
        tails = []
        for n in family.continuations:
            tails.append(range(start, start := start + n))
        tails = sorted((tail for tail in tails if tail), key=lambda tail: -len(tail))
        if len(tails) == 1 and tails[0].start == stem.stop:
            stem, tails = range(stem.start, tails[0].stop), []
        lengths = [len(stem) + len(tail) for tail in tails]
        parts.append(_Part(stem, tuple(tuple(tails[i] for i in run) for run in _alike(lengths))))
    return sorted(parts, key=lambda part: part.order)


def _alike(lengths: Sequence[int]) -> list[range]:
    """Cut descending lengths into runs of like length."""
    runs: list[range] = []
    for i, length in enumerate(lengths):
        if runs and length >= _LEAST_FILL * lengths[runs[-1].start]:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


def _batches(parts: Sequence[_Part]) -> tuple[tuple[Stems, ...], tuple[Tails, ...], list[int]]:
    """Return the batches of stems and tails, and the packed token of each slot, -1 for padding."""
    stems: list[Stems] = []
    tails: list[Tails] = []
    stem_tokens: list[int] = []
    tail_tokens: list[int] = []
    for rows in _alike([len(part.stem) for part in parts]):
        batch = [parts[i] for i in rows]
        stem_tokens += _padded([part.stem for part in batch], length=len(batch[0].stem))
        stems.append(Stems(len(batch), len(batch[0].stem)))
        first = 0
        for order, alike in groupby(batch, key=lambda part: part.order):
            members = list(alike)
            for runs in zip(*(part.runs for part in members), strict=True):
                longest = max(len(run[0]) for run in runs)
                tail_tokens += _padded([tail for run in runs for tail in run], length=longest)
                tails.append(Tails(len(stems) - 1, first, len(members), -order[0], len(runs[0]), longest))
            first += len(members)
    return tuple(stems), tuple(tails), stem_tokens + tail_tokens


def _padded(ranges: Iterable[range], *, length: int) -> list[int]:
    return [token for r in ranges for token in (*r, *([-1] * (length - len(r))))]


def _layout(tokens: Sequence[int], n_tokens: int, device: torch.device) -> Layout | None:
    """Return where the tokens go, None when each stays where it is."""
    of_slot = torch.tensor(tokens)
    if torch.equal(of_slot, torch.arange(n_tokens)):
        return None
    slots = torch.empty(n_tokens, dtype=torch.int64)
    used = torch.nonzero(of_slot >= 0).squeeze(1)
    slots[of_slot[used]] = used
    return Layout(tokens=of_slot.clamp_min(0).to(device), slots=slots.to(device))
