"""Memory in use and its peak: torch's count on CUDA, the resident set of this process on a CPU (Linux)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
#: What written to `clear_refs` makes the peak begin anew: proc(5).
_RESET_PEAK = "5"


def bytes_in_use(device: torch.device) -> int | None:
    """Return the bytes in use now, and begin the peak anew; None where the system does not tell.

    On a CPU memory that was freed, and that the C library keeps for later, is given back first.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # another C library than glibc
        return None
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:  # another system than Linux, or one that forbids it
        return None
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes in use since `bytes_in_use`; None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(name: str) -> int | None:
    """Return a size of `/proc/self/status`, in bytes."""
    if not _STATUS.is_file():
        return None
    sizes = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(sizes[name].split()[0]) * 1024 if name in sizes else None
