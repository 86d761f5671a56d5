"""Kernels on PyTorch's own threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from slime_models.jit import has_numba

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


class Kernel:
    """A compiled kernel and its block (see `compiled`).

    It runs on the threads that PyTorch's operators run on: a second pool would fight with them for the cores, since
    PyTorch's keep spinning for some time when they have nothing to do.

    Args:
        function: what numba compiled; kept alive.
        words: of its block.
    """

    def __init__(self, function: Any, *, words: int) -> None:
        self._function, self._address = function, function.address
        self._block = (ctypes.c_int64 * words)()
        self._at = ctypes.addressof(self._block)
        self._parallel = parallel()

    def set(self, first: int, *values: int) -> None:
        """Set words of the block from `first` on."""
        self._block[first : first + len(values)] = list(values)

    def set_float(self, index: int, value: float) -> None:
        """Set a word to the bits of a float64."""
        ctypes.c_double.from_buffer(self._block, 8 * index).value = value

    def run(self) -> None:
        """Run it, and wait until it is done. The memory that its block names must be alive."""
        self._block[0] = 0
        self._parallel(self._address, self._at, torch.get_num_threads(), 0)


@cache
def parallel() -> Callable[[int, int, int, int], None]:
    """Return `GOMP_parallel(function, argument, threads, flags)` of the OpenMP library that PyTorch is linked with.

    Raises:
        OSError: there is no such library file.
        AttributeError: it has no such function (not on Linux).
    """
    function = ctypes.CDLL(str(_LIBRARY)).GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@cache
def can_compile() -> bool:
    """Return whether kernels can be compiled and run here: numba is installed, and PyTorch's threads can be had."""
    try:
        parallel()
    except (OSError, AttributeError):
        return False
    return has_numba()
