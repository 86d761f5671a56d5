"""Moving memory into huge pages, which makes a decoding step faster on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_COLLAPSE = 25  # MADV_COLLAPSE of <linux/mman.h>, Linux 6.1


def collapse(address: int, nbytes: int) -> int:
    """Move memory of this process into huge pages, where the kernel can; returns how many pages it now lies in.

    A decoding step reads every weight once. In pages of 4 KiB that is some 50,000 addresses to be looked up for SmolLM2-135M,
    which takes a tenth of the products' time (measured: 51 instead of 57 ms with 64 rows).
    Pages are of 2 MiB and whole: what lies before and after in the same mapping moves too, and a page that reaches
    over its mapping's end stays as it is.
    """
    size = _page_size()
    if size == 0:
        return 0
    first, last = address // size, -(-(address + nbytes) // size)
    madvise = _madvise()
    return sum(madvise(page * size, size, _COLLAPSE) == 0 for page in range(first, last))


@cache
def _page_size() -> int:
    """Return a huge page's bytes; 0 where there are none."""
    return int(_SIZE.read_text()) if _SIZE.exists() else 0


@cache
def _madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
