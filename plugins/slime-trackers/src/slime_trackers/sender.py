"""`Sender`: what goes to another program, in order and by a thread of its own, so that a run neither waits for it nor ends by it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Sender:
    """Makes calls in the order in which they are given, on a thread of its own.

    Calls from the first that failed on are kept, and made again with the next one; the first failure is a warning, as is their end.
    A call that the program refuses for what it holds would be refused again, and is left out with a warning.

    Args:
        to: how messages call the program.
        refused: says of an error that the program refused what a call holds.
    """

    def __init__(self, to: str, *, refused: Callable[[Exception], bool] = lambda _: False) -> None:
        self._to, self._refused = to, refused
        self._waiting: deque[Callable[[], object]] = deque()
        self._wake, self._closing, self._failing = threading.Event(), False, False
        self._thread = threading.Thread(target=self._work, name=f"sends to {to}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[], object]) -> None:
        """Make a call after those before it; returns at once."""
        self._waiting.append(call)
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Wait until all calls were made or one failed again, at most so long; warns of those that were not made."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if left := len(self._waiting):
            logger.warning("%s: %d calls were not made; metrics.jsonl has all metrics", self._to, left)

    def _work(self) -> None:
        closing = False
        while not closing:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing  # read after `clear`: a close that came later wakes once more
            self._make_calls()

    def _make_calls(self) -> None:
        while self._waiting:
            try:
                self._waiting[0]()
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                if not self._refused(error):
                    if not self._failing:
                        logger.warning(
                            "%s: a call failed, and is tried again with each step: %s", self._to, told
                        )
                    self._failing = True
                    return
                logger.warning("%s: refused a call, which is left out: %s", self._to, told)
            else:
                if self._failing:
                    logger.warning("%s: answers again; what was kept is sent", self._to)
                self._failing = False
            self._waiting.popleft()
