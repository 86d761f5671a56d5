"""Packing buckets of weights for Ray's object store: tensors as flat bytes, which Ray does not pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.weights.sync import Bucket
from torch import Tensor

#: (name, dtype as torch spells it, shape, bytes); or (name, the numpy array) of a trainer that has no tensors.
Packed = list[tuple[str, str, tuple[int, ...], NDArray[np.uint8]] | tuple[str, NDArray[Any]]]


def pack(bucket: Bucket) -> Packed:
    """Return a bucket as Ray is to carry it; tensors of a CPU are not copied."""
    return [
        (name, value) if isinstance(value, np.ndarray) else _packed(name, value) for name, value in bucket
    ]


def unpack(packed: Packed) -> Bucket:
    """Undo `pack`, on the CPU, in memory of its own."""
    return [(entry[0], entry[1].copy() if len(entry) == 2 else _unpacked(*entry[1:])) for entry in packed]


def _packed(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...], NDArray[np.uint8]]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy()


def _unpacked(dtype: str, shape: tuple[int, ...], values: NDArray[np.uint8]) -> Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = values
    return tensor
