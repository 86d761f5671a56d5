"""`Schedule`: lets the parts of a replayed run go on when what they wait for happened in the recorded one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slime_simulator.replay.recording import Instant, Key

#: Virtual seconds that the run has to decide what follows from the last instant.
_TO_THE_END_S = 1.0


class Schedule:
    """Goes through the instants of a recording in virtual time. Belongs to one event loop.

    Between two instants the run does all that it can, in no time.

    Args:
        instants: in their order.
    """

    def __init__(self, instants: Sequence[Instant]) -> None:
        self._instants = instants
        self._waiting: dict[Key, asyncio.Future[bool]] = {}
        self._past: set[Key] = set()

    def reached(self, key: Key) -> asyncio.Future[bool]:
        """Return what is True from the instant of the key on; it never is if there is none. One waits for a key."""
        future = self._waiting[key] = asyncio.get_running_loop().create_future()
        if key in self._past:
            future.set_result(True)
        return future

    async def run(self) -> None:
        """Go through all instants; returns when what follows from the last one is done."""
        loop = asyncio.get_running_loop()
        for instant in self._instants:
            await asyncio.sleep(max(0.0, instant.at - loop.time()))
            self._past.update(instant.keys)
            for key in instant.keys:
                future = self._waiting.get(key)
                if future is not None and not future.done():
                    future.set_result(True)
        await asyncio.sleep(_TO_THE_END_S)
