"""Kernels on PyTorch's own threads."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
log = logging.getLogger(__name__)


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
    if importlib.util.find_spec("numba") is None:
        return False
    import numba

    try:
        parallel()
    except (OSError, AttributeError):
        return False
    return not numba.config.DISABLE_JIT


def compiled(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what `make` compiles, from the disk if it was compiled before; without a folder to write to, compiled anew."""
    try:
        return make(*args, **options, cache=True)
    except (RuntimeError, OSError) as error:
        log.info("compiled kernels are not kept: %s", error)
        return make(*args, **options, cache=False)
