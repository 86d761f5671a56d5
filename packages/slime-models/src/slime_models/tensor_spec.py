"""`Spec`: the shape and dtype that a tensor of an engine's model must have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

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
