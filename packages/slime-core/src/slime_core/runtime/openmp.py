"""Releasing idle OpenMP threads, which slow down another thread of the process that computes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_SOFT = 1  # omp_pause_soft, OpenMP 5.0, section 3.2.43


def release_threads() -> None:
    """Release the worker threads that GNU OpenMP keeps for the calling thread; its next computation starts new ones.

    PyTorch computes on a CPU with a pool of OpenMP threads for each thread that calls it. While all pools of a process
    together have more threads than the machine has cores, libgomp lets them sleep instead of spin between two
    operations, which makes a small operation wait some 50 us for its threads to wake up (measured on 2 cores with a
    second, idle pool: generation at two thirds of its speed). So a trainer or an engine calls this on its thread when it
    has nothing left to do. Starting the threads again takes some 50 us once.

    Does nothing where there is no libgomp.
    """
    if _MAPS.exists():
        library = _libgomp(_loaded())
        if library is not None:
            library.omp_pause_resource_all(_SOFT)


def _loaded() -> str | None:
    """Return the path of the libgomp that this process has loaded."""
    lines = _MAPS.read_text().splitlines()
    return next((line.split()[-1] for line in lines if "/libgomp" in line), None)


@cache
def _libgomp(path: str | None) -> ctypes.CDLL | None:
    if path is None:
        return None
    library = ctypes.CDLL(path)
    return library if hasattr(library, "omp_pause_resource_all") else None
