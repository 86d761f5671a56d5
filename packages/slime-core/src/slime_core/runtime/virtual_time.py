"""An event loop whose clock jumps to the next timer: hours of waiting pass in no time. For simulations and tests."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any

from slime_core.errors import RunError


class _NoWaiting(selectors.DefaultSelector):
    """Looks for events without waiting, and adds what the loop wanted to wait for to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the events that are there.

        Raises:
            RunError: there is neither an event nor a timer, so that nothing would ever happen.
        """
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RunError("virtual time: nothing is scheduled any more, and something still waits")
            if timeout > 0:  # also where it is less than the clock can show after a hundred days
                self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0. Nothing in it may wait for threads, processes or sockets."""

    def __init__(self) -> None:
        self._jumping = _NoWaiting()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time, seconds."""
        return self._jumping.now


def run_in_virtual_time[T](work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run a coroutine in virtual time; returns its result, and how many seconds it took there."""
    loop = VirtualTimeLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(work)
        return result, loop.time()
