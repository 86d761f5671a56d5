"""Splitting Megatron tensors for tensor parallelism by a rule's `Shard`, and joining them again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slime_core.errors import TrainerError
from torch import Tensor

from slime_models.family.architecture import Architecture
from slime_models.family.rules import Shard

_DIMENSION = {Shard.ROWS: 0, Shard.COLUMNS: 1, Shard.QKV_ROWS: 0, Shard.GATED_ROWS: 0}


def split(tensor: Tensor, shard: Shard, size: int, architecture: Architecture) -> tuple[Tensor, ...]:
    """Return the part of each of `size` tensor-parallel ranks; views, but for gated rows.

    Raises:
        TrainerError: the tensor cannot be cut into `size` equal parts.
    """
    if shard is Shard.NONE or size == 1:
        return (tensor,) * size
    units = architecture.num_query_groups if shard is Shard.QKV_ROWS else tensor.shape[_DIMENSION[shard]]
    if shard is Shard.GATED_ROWS:
        units //= 2
    if units % size:
        what = "query groups" if shard is Shard.QKV_ROWS else shard.value
        raise TrainerError(
            f"{units} {what} cannot be cut for {size} tensor-parallel ranks; choose a divisor of {units}"
        )
    if shard is Shard.GATED_ROWS:
        gate, up = (half.chunk(size) for half in tensor.chunk(2))
        return tuple(torch.cat(pair) for pair in zip(gate, up, strict=True))
    return tensor.chunk(size, dim=_DIMENSION[shard])


def join(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """Return the whole tensor from the parts of all ranks, in rank order: the inverse of `split`."""
    if shard is Shard.NONE or len(parts) == 1:
        return parts[0]
    if shard is Shard.GATED_ROWS:
        gate, up = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gate, *up])
    return torch.cat(tuple(parts), dim=_DIMENSION[shard])
