"""`Clock`: what measuring needs of a device, and one of a device that is this machine's CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

_FLUSHED_BYTES = 64 << 20


class Clock(Protocol):
    """Operations of a device. What is given to it may be done later, in streams of which some may do theirs beside others."""

    source: str
    """The name under which records have what it measures."""

    def flush(self) -> None:
        """Have the device's caches filled with something else."""

    def mark(self) -> Any:
        """Put a mark behind all that the stream of the caller was given."""

    def between_us(self, first: Any, last: Any) -> float:
        """Wait for the second mark, and return the microseconds between both."""

    def drain_us(self) -> float:
        """Wait until all streams have done what they were given, and return the microseconds that this took."""


class CpuClock:
    """The CPU as a device: what is called is done at once, and `wait` waits for what other threads do.

    It shows that measuring works where there is no GPU; its times are those of this machine, and no reward is made of them.
    """

    source = "cpu-clock"

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self._wait, self._pages = wait, bytearray(_FLUSHED_BYTES)

    def flush(self) -> None:
        """Write more than caches hold."""
        self._pages[::64] = bytes(len(self._pages) // 64)

    def mark(self) -> float:
        """Return the time, seconds."""
        return time.perf_counter()

    def between_us(self, first: float, last: float) -> float:
        """Return the microseconds between two times."""
        return 1e6 * (last - first)

    def drain_us(self) -> float:
        """Wait for other threads."""
        begin = time.perf_counter()
        self._wait()
        return 1e6 * (time.perf_counter() - begin)
