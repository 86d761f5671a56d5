"""`SharedCores`: an engine and a trainer that slow each other down while both are at work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from slime_simulator.costs.costs import Slowdown
from slime_simulator.parts.replica import SimulatedReplica

#: Seconds of training that count as none.
_EPSILON = 1e-9


class SharedCores:
    """Knows which parts are at work. Belongs to one event loop.

    Args:
        slowdown: of each part while the other is at work, too.
        replicas: of the engine, at least one, all of the same costs.
    """

    def __init__(self, slowdown: Slowdown, replicas: Sequence[SimulatedReplica]) -> None:
        self._slowdown, self._replicas = slowdown, replicas
        self._alone = replicas[0].costs
        self._beside = slowdown.of(self._alone)
        self._generates = False
        self._changed = asyncio.Event()

    def engine_works(self, works: bool) -> None:
        """Say whether the engine has requests."""
        self._generates = works
        self._changed.set()

    async def train(self, seconds: float) -> None:
        """Return when training is over that takes so many seconds alone."""
        self._set_trains(True)
        loop = asyncio.get_running_loop()
        try:
            while seconds > _EPSILON:
                times, begin = self._slowdown.trainer if self._generates else 1.0, loop.time()
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds * times):
                        await self._changed.wait()
                seconds -= (loop.time() - begin) / times
        finally:
            self._set_trains(False)

    def _set_trains(self, trains: bool) -> None:
        costs = self._beside if trains else self._alone
        if self._beside != self._alone:
            for replica in self._replicas:
                replica.change(costs)
