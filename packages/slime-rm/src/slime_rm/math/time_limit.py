"""A limit on the computing time of a block, for libraries that may run away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class LimitExceeded(BaseException):
    """A block used up its time. No `Exception`, so that the library inside cannot swallow it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `LimitExceeded` inside the block once this process has computed for `seconds` in it.

    Computing time, not time of day: a verdict must not depend on what else the machine does. Only the main thread
    can be interrupted, and only between two steps of the interpreter; elsewhere the block runs without a limit,
    and the deadline of the reward pool, whose workers call rewards in their main thread, is what stops it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = [True]

    def stop(number: int, frame: FrameType | None) -> None:
        if armed:
            raise LimitExceeded

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        # Again and again, in case a bare `except` inside swallows the first.
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)
        yield
    finally:
        try:
            armed.clear()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
