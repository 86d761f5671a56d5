"""Gathering and scattering of parts that are not of one size, which gloo refuses: padded, or reduced whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gather_uneven(part: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Return the parts of all ranks, one after another. Collective over `group`.

    Args:
        part: [its size, ...], of this rank.
        group: the ranks.
        sizes: rows of each rank's part.
    """
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([each[:n] for each, n in zip(parts, sizes, strict=True)])


def scatter_uneven(whole: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Return this rank's part of the sum over ranks. Collective over `group`.

    Args:
        whole: [sum of sizes, ...], of this rank.
        group: the ranks.
        sizes: rows of each rank's part.
    """
    reduced = whole.clone()
    dist.all_reduce(reduced, group=group)
    part: Tensor = reduced.split(list(map(int, sizes)))[group.rank()].clone()
    return part
