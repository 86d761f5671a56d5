"""`Spec`: the shape and dtype that a tensor of an engine's model must have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a tensor of an engine's model must be."""

    shape: Shape
    dtype: str
    """As torch spells it: `bfloat16`."""

    @property
    def n_bytes(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    def view(self, memory: Tensor, offset: int) -> Tensor:
        """Return the tensor that lies at an offset of memory, [n_bytes] uint8."""
        part = memory[offset : offset + self.n_bytes]
        return part.view(getattr(torch, self.dtype)).view(self.shape)
