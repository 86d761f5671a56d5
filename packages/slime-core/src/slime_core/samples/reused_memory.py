"""`ReusedMemory`: large arrays of one step after the other in the same memory.

The C library gives the memory of large arrays back to the system when they are gone, and the system fills with zeros what it
hands out anew: for the columns of a batch that takes longer than to write them.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: Bytes of the smallest array that is worth it: what the C library takes from the system one by one.
_LARGE = 1 << 20
#: Share of an array by which its block is larger, for one of a later step that is a little longer.
_ROOM = 1 / 8
#: How many times larger than an array its block may be.
_MOST = 4


class ReusedMemory:
    """Makes arrays in blocks of memory, each of which has one array at a time.

    A block is used again when nothing refers to its array any more, nor to a view, a tensor or a buffer of it: all of them refer
    to the block, and the interpreter counts that. So nobody has to give anything back, and who keeps an array has it to himself.
    Blocks that nobody uses are let go of when none of them fits: what is kept is at most what was in use at once.

    Belongs to one thread; arrays may go elsewhere, and end there.
    """

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.uint8]] = []

    def empty(self, n: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return an array [n] with any values in it, as `numpy.empty` does."""
        n_bytes = n * np.dtype(dtype).itemsize
        if n_bytes < _LARGE:
            return np.empty(n, dtype)
        unused = [i for i in range(len(self._blocks)) if _references(self._blocks, i) == _UNUSED]
        fitting = [i for i in unused if n_bytes <= len(self._blocks[i]) <= _MOST * n_bytes]
        if not fitting:
            for i in reversed(unused):
                del self._blocks[i]
            fitting = [len(self._blocks)]
            self._blocks.append(np.empty(n_bytes + int(n_bytes * _ROOM), np.uint8))
        block = self._blocks[min(fitting, key=lambda i: len(self._blocks[i]))]
        return block[:n_bytes].view(dtype)


def _references(blocks: list[NDArray[np.uint8]], i: int) -> int:
    return sys.getrefcount(blocks[i])


#: References to a block that only the list has.
_UNUSED = _references([np.empty(0, np.uint8)], 0)
