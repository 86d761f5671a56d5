"""`Gate`: the requests that are under way at one address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from slime_core.errors import DeadlineError

#: Seconds between two calls that end requests.
_POLL_S = 0.25


class Gate:
    """Lets so many requests through at once, and ends all of them on demand.

    Args:
        width: most requests at once; further ones wait here.
    """

    def __init__(self, width: int) -> None:
        self._slots = asyncio.Semaphore(width)
        self._aborts = 0
        self.pending = 0
        """Requests that are under way or wait."""
        self._in_flight = 0

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Count a request that is to come as one that waits, within the context."""
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1

    async def pass_through[T](self, send: Callable[[], Awaitable[T]]) -> T | None:
        """Send a request when it is its turn, and return the answer; None where an abort ended the wait."""
        aborts = self._aborts
        with self.expecting():
            async with self._slots:
                if aborts != self._aborts:
                    return None
                self._in_flight += 1
                try:
                    return await send()
                finally:
                    self._in_flight -= 1

    async def abort(self, end: Callable[[], Awaitable[object]], *, timeout_s: float) -> None:
        """Call `end`, which ends what is under way, until nothing is.

        Raises:
            DeadlineError: something still is after `timeout_s` seconds.
        """
        self._aborts += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self._in_flight:  # one may have reached the server after the last call
                    await end()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"abort: {self._in_flight} requests still under way after {timeout_s:g} s"
            ) from error
