"""`Keeper`: engines of one model, started together, and another one started in the place of one that is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from slime_core.errors import DeadlineError, EngineError, WeightSyncError

from slime_sglang.health import watch
from slime_sglang.seat import Seat
from slime_sglang.section import FleetSection

logger = logging.getLogger(__name__)


class Register(Protocol):
    """Whoever is to know which servers can be asked."""

    async def start(self) -> None:
        """Get ready."""

    async def add(self, url: str, key: str | None) -> None:
        """Take a server in, which asks for a key."""

    async def remove(self, url: str) -> None:
        """Take a server out; it may be unknown."""

    async def close(self) -> None:
        """Stop. May be called twice."""


class Keeper:
    """Keeps seats taken. Without `use_fault_tolerance` it starts their engines and ends them, and that is all.

    Args:
        seats: one for each engine.
        section: settings of the fleet.
        register: is told which servers there are.
        join: brings an engine that has just started to where the others are, and calls `seat_in` for it.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        *,
        section: FleetSection,
        register: Register | None = None,
        join: Callable[[Seat], Awaitable[None]] | None = None,
    ) -> None:
        self._seats, self._section, self._register = tuple(seats), section, register
        self._join = join or self.seat_in
        self._guards: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start all engines, and wait until they are ready.

        Raises:
            EngineError: one of them ended, or is not one that can be used.
            DeadlineError: one was not ready in time.
        """
        if self._register is not None:
            await self._register.start()
        await all_of([seat.engine.start() for seat in self._seats])
        for seat in self._seats:
            await self.seat_in(seat)
        if self._section.use_fault_tolerance:
            self._guards = [asyncio.create_task(self._guard(seat)) for seat in self._seats]

    async def changed(self) -> None:
        """Wait until an engine comes, goes or passes a check.

        Raises:
            Exception: whatever ended a guard, whose seat nobody watches any more.
        """
        for guard in self._guards:
            if guard.done():
                guard.result()  # a guard ends quietly only when its seat is gone
        await self._changed.wait()

    def tell(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def seat_in(self, seat: Seat) -> None:
        """Have a seat's engine serve."""
        if self._register is not None:
            await self._register.add(seat.engine.url, seat.engine.key)
        seat.state = "serving"
        self.tell()

    async def close(self) -> None:
        """Stop all engines, and free everything. May be called twice."""
        for guard in self._guards:
            guard.cancel()
        await asyncio.gather(*self._guards, return_exceptions=True)
        self._guards = []
        if self._register is not None:
            await self._register.close()
        await all_of([seat.engine.close() for seat in self._seats])

    async def _guard(self, seat: Seat) -> None:
        """Watch the engines of a seat, one after the other, until it had its last."""
        section = self._section
        try:
            while seat.state != "gone":
                reason = await watch(
                    seat.engine,
                    first_wait_s=section.rollout_health_check_first_wait,
                    interval_s=section.rollout_health_check_interval,
                    timeout_s=section.rollout_health_check_timeout,
                    cleared=self.tell,
                )
                await self._take_out(seat, reason if seat.state == "serving" else seat.reason)
                while seat.replace():
                    try:
                        await seat.engine.start()
                        await self._join(seat)
                        logger.warning(
                            "%s serves again, with weights of version %s",
                            seat.name,
                            seat.engine.weight_version,
                        )
                        break
                    except (EngineError, DeadlineError, WeightSyncError) as error:
                        await self._take_out(seat, str(error))
            logger.error("%s is given up", seat.name)
        finally:
            self.tell()

    async def _take_out(self, seat: Seat, reason: str) -> None:
        """Give an engine nothing more, and end it with everything that it holds."""
        logger.warning("%s is lost, with %d requests under way: %s", seat.name, seat.pending, reason)
        seat.lose(reason)
        self.tell()
        try:
            if self._register is not None:
                await self._register.remove(seat.engine.url)
        finally:
            await seat.engine.kill()


async def all_of[T](work: Sequence[Awaitable[T]]) -> list[T]:
    """Await all; at the first failure cancel the others and raise it."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        raise
