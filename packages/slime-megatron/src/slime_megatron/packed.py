"""Packed sequences: many sequences in one row, tokens of a common prompt only once, and what attention needs for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

#: Sequences are padded to the longest of their group; a group holds those of at least this share of its length.
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
class LengthGroup:
    """Sequences of like length, which attention takes as one padded batch."""

    start: int
    """First slot of the group in the flat padded batches of all groups."""
    size: int
    """Number of sequences."""
    length: int
    """Tokens of the longest."""

    @property
    def stop(self) -> int:
        """One past its last slot."""
        return self.start + self.size * self.length


@dataclass(frozen=True)
class Layout:
    """How the tokens of the packed row go into the slots of the padded batches, and come back.

    A token of a prompt goes into one slot for each continuation; what attention makes of it is the same in all of
    them, and comes back from the first.
    """

    tokens: Tensor
    """int64 [slots]: the token that goes into each slot; any, where a slot is padding."""
    slots: Tensor
    """int64 [t]: the (first) slot of each token."""
    copied: Tensor
    """int64 [c]: the tokens that go into more than one slot."""
    copies: Tensor
    """int64 [c, m]: the further slots of each of them; any, where there are fewer than m."""
    is_copy: Tensor
    """bool [c, m]: which entries of `copies` are meant."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of a thd batch, with what our attention reads besides (see `attention`)."""

    groups: tuple[LengthGroup, ...] = ()
    """The sequences, longest first."""
    layout: Layout | None = None
    """None where the padded batches are the packed row itself: nothing is padded, shared or moved."""
    n_tokens: int = 0
    """Tokens of the row."""
    n_attended: int = 0
    """Tokens of all sequences, shared prompts counted in each."""
    cos: Tensor | None = None
    """[t, 1, head_dim] cosine of each token's rotary angles, in the compute dtype."""
    sin: Tensor | None = None
    """[t, 1, head_dim] sine of the same."""

    @property
    def n_slots(self) -> int:
        """Slots of all padded batches."""
        return self.groups[-1].stop


def pack(families: Sequence[Family], cos_sin: tuple[Tensor, Tensor]) -> PackedSequences:
    """Describe families that lie one after another in a packed row.

    Args:
        families: at least one.
        cos_sin: [n, head_dim] each: cosine and sine of the rotary angles of positions 0 to n - 1, on the
            device of the model; n is at least the longest sequence.
    """
    cos, sin = cos_sin
    device = cos.device
    sequences, n_tokens = _sequences(families)
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
    groups = _groups([len(sequences[i]) for i in order])
    positions = torch.cat([_positions(family) for family in families]).to(device)
    ends = torch.tensor([0, *(family.n_tokens for family in families)]).cumsum(0)
    ends = ends.to(device=device, dtype=torch.int32)
    longest = len(sequences[order[0]])
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        groups=groups,
        layout=_layout([sequences[i] for i in order], groups, n_tokens, device),
        n_tokens=n_tokens,
        n_attended=sum(len(sequence) for sequence in sequences),
        cos=cos[positions][:, None],
        sin=sin[positions][:, None],
    )


def _sequences(families: Iterable[Family]) -> tuple[list[Tensor], int]:
    """Return the packed tokens of each sequence, in order of its positions, and the tokens of the row."""
    sequences: list[Tensor] = []
    start = 0
    for family in families:
        prompt = torch.arange(start, start + family.prompt)
        start += family.prompt
        for n in family.continuations or (0,):
            sequences.append(torch.cat([prompt, torch.arange(start, start + n)]))
            start += n
    return sequences, start


def _positions(family: Family) -> Tensor:
    """Return int64: the position of each packed token of a family in its own sequence."""
    tails = [torch.arange(family.prompt, family.prompt + n) for n in family.continuations]
    return torch.cat([torch.arange(family.prompt), *tails])


def _groups(lengths: Sequence[int]) -> tuple[LengthGroup, ...]:
    """Cut descending lengths into groups of like length."""
    groups: list[LengthGroup] = []
    first, start = 0, 0
    while first < len(lengths):
        last = first + 1
        while last < len(lengths) and lengths[last] >= _LEAST_FILL * lengths[first]:
            last += 1
        groups.append(LengthGroup(start, last - first, lengths[first]))
        first, start = last, groups[-1].stop
    return tuple(groups)


def _layout(
    sequences: Sequence[Tensor], groups: Sequence[LengthGroup], n_tokens: int, device: torch.device
) -> Layout | None:
    """Return where the tokens go; `sequences` are in the order of the groups."""
    tokens = torch.full((groups[-1].stop,), -1)
    remaining = iter(sequences)
    for group in groups:
        for row in range(group.size):
            sequence = next(remaining)
            first = group.start + row * group.length
            tokens[first : first + len(sequence)] = sequence
    if torch.equal(tokens, torch.arange(n_tokens)):
        return None
    used = torch.nonzero(tokens >= 0).squeeze(1)
    by_token = used[
        torch.argsort(tokens[used], stable=True)
    ]  # the slots of token 0, then those of token 1, ...
    counts = torch.bincount(tokens[used], minlength=n_tokens)
    firsts = counts.cumsum(0) - counts
    copied = torch.nonzero(counts > 1).squeeze(1)
    nth = torch.arange(1, max(2, int(counts.max())))
    is_copy = nth[None] < counts[copied, None]
    copies = by_token[(firsts[copied, None] + nth[None]).where(is_copy, firsts[copied, None])]
    return Layout(
        tokens=tokens.clamp_min(0).to(device),
        slots=by_token[firsts].to(device),
        copied=copied.to(device),
        copies=copies.to(device),
        is_copy=is_copy.to(device),
    )
