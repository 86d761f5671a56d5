"""Context parallelism: zigzag chunks of each sequence, and attention over gathered keys and values.

A sequence is padded to 2n chunks of equal length for n ranks, and rank r takes chunks r and 2n - 1 - r ("zigzag"):
an early chunk, whose causal attention is cheap, and a late one, whose attention is expensive.

Source: Megatron-LM's zigzag order; keys and values are gathered as in Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from numpy.typing import NDArray
from torch import Tensor

_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ZigZag:
    """Sequences of which this rank has two chunks each: sequence after sequence, the earlier chunk first."""

    chunks: tuple[int, ...]
    """Tokens of each of the 2n chunks, for each sequence."""
    group: dist.ProcessGroup
    """The ranks that have the other chunks."""

    @classmethod
    def of(cls, lengths: Sequence[int], group: dist.ProcessGroup) -> ZigZag:
        """Return the chunks of sequences of these lengths, padded to a multiple of 2n tokens."""
        return cls(tuple(-(-length // (2 * group.size())) for length in lengths), group)

    @property
    def padded(self) -> tuple[int, ...]:
        """Tokens of each sequence over all ranks, padding included."""
        return tuple(2 * self.group.size() * chunk for chunk in self.chunks)

    def own_tokens(self) -> NDArray[np.int64]:
        """Return int64 [t]: indices in the padded row, sequence after sequence, of this rank's tokens."""
        rank, last = self.group.rank(), 2 * self.group.size() - 1
        starts = [0]
        for length in self.padded:
            starts.append(starts[-1] + length)
        return np.concatenate(
            [
                np.arange(start + k * chunk, start + (k + 1) * chunk)
                for start, chunk in zip(starts, self.chunks, strict=False)
                for k in (rank, last - rank)
            ]
        )


def attend_zigzag(query: Tensor, key: Tensor, value: Tensor, zigzag: ZigZag, attend: _Attend) -> Tensor:
    """Attend from this rank's tokens to all before them in their sequences. Collective over the context group.

    Args:
        query: [t, heads, head_dim], this rank's tokens.
        key: [t, groups, head_dim].
        value: [t, groups, head_dim].
        zigzag: where sequences begin and end.
        attend: causal attention of q [b, l, ...] and k, v [b, m, ...], aligned at the last token, to [b * l, width].

    Returns:
        [t, width], this rank's tokens.
    """
    n_ranks, rank = zigzag.group.size(), zigzag.group.rank()
    both = torch.stack([key, value], dim=1)
    gathered = tensor_parallel.gather_from_sequence_parallel_region(both, group=zigzag.group)
    gathered = gathered.unflatten(0, (n_ranks, -1))
    outputs, start = [], 0
    for chunk, alike in groupby(zigzag.chunks):
        n = len(list(alike))
        own = slice(start, start := start + 2 * n * chunk)
        lower, upper = query[own].unflatten(0, (n, 2, chunk)).unbind(1)
        # [rank, sequence, lower or upper, token, key or value, ...] to the order of tokens in each sequence
        halves = gathered[:, own].unflatten(1, (n, 2, chunk))
        whole = torch.cat([halves[:, :, 0], halves[:, :, 1].flip(0)]).transpose(0, 1).flatten(1, 2)
        k, v = whole.unbind(2)
        pair = [
            attend(q, k[:, :end], v[:, :end]).unflatten(0, (n, chunk))
            for q, end in ((lower, (rank + 1) * chunk), (upper, (2 * n_ranks - rank) * chunk))
        ]
        outputs.append(torch.stack(pair, dim=1).flatten(0, 2))
    return torch.cat(outputs)


class GatherTokens(torch.autograd.Function):
    """Gather a vector of which each rank has some entries: [n] to [R] on every rank. Collective over the group, if any.

    Entries that no rank has are 0. Every rank computes the same loss from the result, so the backward pass takes each rank's
    own entries of the gradient, without adding up.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        own: Tensor,
        places: Tensor,
        size: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        """Return the vector of `size` entries, with `own` at `places` and the entries of other ranks elsewhere."""
        ctx.save_for_backward(places)
        whole = own.new_zeros(size).index_copy_(0, places, own)
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Return the gradient of this rank's entries."""
        (places,) = ctx.saved_tensors  # type: ignore[attr-defined]  # torch's stub lacks it
        return gradient.index_select(0, places), None, None, None
