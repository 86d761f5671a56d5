"""Packed sequences: many sequences one after another in one row, with what attention needs to keep them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

#: Sequences are padded to the longest of their group; a group holds those of at least this share of its length.
_LEAST_FILL = 0.75


@dataclass(frozen=True)
class LengthGroup:
    """Neighbouring sequences of like length, which attention takes as one padded batch."""

    start: int
    """First token of the group in the packed row."""
    stop: int
    """One past its last token."""
    size: int
    """Number of sequences."""
    length: int
    """Tokens of the longest."""
    slots: Tensor | None
    """int64 [stop - start]: place of each token in the flat padded batch; None where nothing is padded."""

    @property
    def padded(self) -> int:
        """Tokens of the padded batch."""
        return self.size * self.length


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of a thd batch, with what our attention reads besides (see `attention`)."""

    groups: tuple[LengthGroup, ...] = ()
    """The sequences, in order."""
    cos: Tensor | None = None
    """[t, 1, head_dim] cosine of each token's rotary angles, in the compute dtype."""
    sin: Tensor | None = None
    """[t, 1, head_dim] sine of the same."""


def pack_sequences(lengths: Sequence[int], cos_sin: tuple[Tensor, Tensor]) -> PackedSequences:
    """Describe sequences that lie one after another; longest first pads least.

    Args:
        lengths: tokens of each sequence.
        cos_sin: [n, head_dim] each: cosine and sine of the rotary angles of positions 0 to n - 1, on the
            device of the model; n is at least the longest length.
    """
    cos, sin = cos_sin
    device = cos.device
    positions = position_ids(lengths).to(device)
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device=device, dtype=torch.int32)
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        groups=tuple(_groups(lengths, device)),
        cos=cos[positions][:, None],
        sin=sin[positions][:, None],
    )


def position_ids(lengths: Sequence[int]) -> Tensor:
    """Return int64 [t]: the position of each packed token in its own sequence."""
    return torch.cat([torch.arange(n) for n in lengths])


def _groups(lengths: Sequence[int], device: torch.device) -> list[LengthGroup]:
    groups, first, start = [], 0, 0
    while first < len(lengths):
        last = first + 1
        low = high = lengths[first]
        while last < len(lengths):
            low, high = min(low, lengths[last]), max(high, lengths[last])
            if low < _LEAST_FILL * high:
                break
            last += 1
        members = lengths[first:last]
        group = _group(members, start, device)
        groups.append(group)
        first, start = last, group.stop
    return groups


def _group(lengths: Sequence[int], start: int, device: torch.device) -> LengthGroup:
    length, total = max(lengths), sum(lengths)
    slots = None
    if total < length * len(lengths):
        rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        slots = (rows * length + position_ids(lengths)).to(device)
    return LengthGroup(start, start + total, len(lengths), length, slots)
