"""`TokenSplit`: how the ranks of one model replica share the tokens of a packed row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenSplit:
    """How the ranks of one model share the tokens of a packed row."""

    context: dist.ProcessGroup | None = None
    """The context-parallel group, whose ranks have zigzag chunks of each sequence; None without context parallelism."""
    parts: int = 1
    """Into how many equal parts tensor-parallel ranks cut a row: as many as there are under sequence parallelism, else 1."""
    part: int = 0
    """Which of them this rank has, from 0."""
    alignment: int = 1
    """The number of tokens of a part must be a multiple of this."""

    def own_part(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the part of a row that sequence parallelism gives to this rank."""
        size = len(row) // self.parts
        return row[self.part * size : (self.part + 1) * size]

    @property
    def multiple(self) -> int:
        """The number of tokens of a row must be a multiple of this."""
        return self.parts * self.alignment

    @property
    def max_padding(self) -> int:
        """Upper bound of the tokens that are padded to a sequence, and of those of a sequence that is padding alone."""
        return self.multiple * (1 if self.context is None else 2 * self.context.size())
