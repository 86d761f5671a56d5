"""OpenMP threads beside others: releasing idle ones, and threads that compute without any."""

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
    if (library := _library()) is not None and hasattr(library, "omp_pause_resource_all"):
        library.omp_pause_resource_all(_SOFT)


def compute_alone() -> None:
    """Have GNU OpenMP start no workers for the calling thread from now on; other threads keep theirs.

    PyTorch sets a thread's number itself when that thread first computes, so have it do that (`torch.get_num_threads()`) before.
    Workers that wait for one another spin: where other processes want the cores, too, fingerprints of 256 MiB took 0.23 s of
    two cores' time with two workers, and 0.05 s on one thread.

    Does nothing where there is no libgomp.
    """
    if (library := _library()) is not None:
        library.omp_set_num_threads(1)


def _library() -> ctypes.CDLL | None:
    try:
        return _found()
    except LookupError:
        return None


@cache
def _found() -> ctypes.CDLL:
    """Return the library; once it is found it is not looked for again.

    Raises:
        LookupError: it is not loaded, or not yet.
    """
    path = _loaded() if _MAPS.exists() else None
    if path is None:
        raise LookupError(_MAPS)
    return ctypes.CDLL(path)


def _loaded() -> str | None:
    """Return the path of the libgomp that this process has loaded."""
    lines = _MAPS.read_text().splitlines()
    return next((line.split()[-1] for line in lines if "/libgomp" in line), None)
