"""`RequestGate`: the requests in flight at one address, of which there may be so many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from slime_core.errors import DeadlineError

from slime_sglang.http.client import CONTROL_FLAG

#: Seconds between two calls that abort requests.
_POLL_S = 0.25


class RequestGate:
    """Limits the requests in flight, and aborts all of them on demand.

    Args:
        width: most requests in flight at once; further ones wait here.
    """

    def __init__(self, width: int) -> None:
        self._slots = asyncio.Semaphore(width)
        self._aborts = 0
        self.pending = 0
        """Requests in flight or waiting."""
        self._in_flight = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for others to be answered, or are still to come."""
        return self.pending - self._in_flight

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Count a request that is still to come as waiting, within the context."""
        self.pending += 1
        try:
            yield
        finally:
            self.pending -= 1

    async def pass_through[T](self, send: Callable[[], Awaitable[T]]) -> T | None:
        """Send a request when there is room, and return the answer; None where an abort came while it waited."""
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
        """Call `end`, which aborts the requests in flight, until none is.

        Raises:
            DeadlineError: a request still is after `timeout_s` seconds.
        """
        self._aborts += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self._in_flight:  # one may have reached the server after the last call
                    await end()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"abort: {self._in_flight} requests still in flight after {timeout_s:g} s ({CONTROL_FLAG})"
            ) from error
