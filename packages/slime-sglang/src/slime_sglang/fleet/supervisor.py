"""`EngineSupervisor`: starts the engines of one model, watches them, and replaces those that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from slime_core.errors import DeadlineError, EngineError, WeightSyncError

from slime_sglang.fleet.health import watch
from slime_sglang.fleet.replica import Replica
from slime_sglang.settings.section import FleetSection

logger = logging.getLogger(__name__)


class ServerRegistry(Protocol):
    """Whoever must know which servers take requests: a router, or the address book of the run."""

    async def start(self) -> None:
        """Get ready."""

    async def add(self, url: str, key: str | None) -> None:
        """Add a server, which asks for an API key; None where it asks for none."""

    async def remove(self, url: str) -> None:
        """Remove a server; it may be unknown."""

    async def close(self) -> None:
        """Stop. May be called twice."""


class EngineSupervisor:
    """Starts, watches, replaces and stops engines. Without `use_fault_tolerance` it only starts and stops them.

    Args:
        replicas: one for each engine.
        section: settings of the fleet.
        registry: is told which servers there are.
        join: brings an engine that has just started to the others' weights and state, and calls `admit` for it.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        section: FleetSection,
        registry: ServerRegistry | None = None,
        join: Callable[[Replica], Awaitable[None]] | None = None,
    ) -> None:
        self._replicas, self._section, self._registry = tuple(replicas), section, registry
        self._join = join or self.admit
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._n_starting = 0
        self._may_start, self._are_late = asyncio.Event(), asyncio.Event()
        self._may_start.set()

    async def start(self) -> None:
        """Start all engines, and wait until they are ready.

        Raises:
            EngineError: one of them exited, or does not serve what this run needs.
            DeadlineError: one was not ready in time.
        """
        if self._registry is not None:
            await self._registry.start()
        await gather_all([replica.engine.start() for replica in self._replicas])
        for replica in self._replicas:
            await self.admit(replica)
        if self._section.use_fault_tolerance:
            self._watchers = [asyncio.create_task(self._watch_replica(replica)) for replica in self._replicas]

    async def changed(self) -> None:
        """Wait until an engine joins, is lost or passes a health check.

        Raises:
            Exception: whatever made a watcher fail, whose replica nobody watches any more.
        """
        for watcher in self._watchers:
            if watcher.done():
                watcher.result()  # a watcher returns only when its replica is gone
        await self._changed.wait()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def admit(self, replica: Replica) -> None:
        """Have a replica's engine serve."""
        if self._registry is not None:
            await self._registry.add(replica.engine.url, replica.engine.key)
        if replica.reason:
            logger.warning(
                "%s serves again, with weights of version %s", replica.name, replica.engine.weight_version
            )
        replica.state = "serving"
        self.notify()

    def keep_waiting(self, replica: Replica) -> None:
        """Have a replica's engine, which has started, wait for an update."""
        logger.warning("%s has started again, and waits for weights", replica.name)
        replica.state = "waiting"
        self.notify()

    async def hold_starts(self, patience_s: float) -> None:
        """Start no engine until `allow_starts`: a server that starts takes memory of devices that others need meanwhile.

        Args:
            patience_s: how long engines that are starting are waited for; those that take longer are ended, which is a failed start.
        """
        self._may_start.clear()
        try:
            async with asyncio.timeout(patience_s):
                await self._none_starts()
        except TimeoutError:
            self._are_late.set()
            await self._none_starts()
        finally:
            self._are_late.clear()

    def allow_starts(self) -> None:
        """Have engines started again."""
        self._may_start.set()

    async def close(self) -> None:
        """Stop all engines, and free everything. May be called twice."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []
        if self._registry is not None:
            await self._registry.close()
        await gather_all([replica.engine.close() for replica in self._replicas])

    async def _watch_replica(self, replica: Replica) -> None:
        """Watch the engines of a replica, one after the other, until no restart is left."""
        section = self._section
        try:
            while replica.state != "gone":
                reason = await watch(
                    replica.engine,
                    first_wait_s=section.rollout_health_check_first_wait,
                    interval_s=section.rollout_health_check_interval,
                    timeout_s=section.rollout_health_check_timeout,
                    cleared=self.notify,
                )
                await self._remove(replica, replica.reason if replica.state == "starting" else reason)
                while not await self._replace(replica):
                    pass
            logger.error("%s is given up", replica.name)
        finally:
            self.notify()

    async def _replace(self, replica: Replica) -> bool:
        """Have another engine take the place of a lost one; returns whether one did, or none may any more."""
        try:
            if replica.replace():
                await self._start_replacement(replica)
        except Exception as error:  # the process edge: whatever it was, the restarts that are left are tried
            is_expected = isinstance(error, EngineError | DeadlineError | WeightSyncError)
            if not is_expected:
                logger.error("%s was not started again", replica.name, exc_info=error)
            await self._remove(replica, str(error) if is_expected else f"{type(error).__name__}: {error}")
            return False
        return True

    async def _start_replacement(self, replica: Replica) -> None:
        """Start the engine that takes the place of a lost one, when that is allowed, and bring it to the others' state.

        Raises:
            DeadlineError: it was late: see `hold_starts`. As after any failure, nothing of it is left on the devices.
        """
        while not self._may_start.is_set():  # it may be taken back before who waits for it goes on
            await self._may_start.wait()
        self._n_starting += 1
        starting, late = (
            asyncio.ensure_future(one) for one in (replica.engine.start(), self._are_late.wait())
        )
        try:
            await asyncio.wait({starting, late}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
                raise DeadlineError(
                    "it was still starting when the trainer had waited for its devices for half of --weight-sync-timeout-s; "
                    "give a longer one, or a model that starts sooner"
                )
            starting.result()
            await self._join(replica)
        except BaseException:
            await replica.engine.kill()
            raise
        finally:
            for task in (starting, late):
                task.cancel()
            await asyncio.gather(starting, late, return_exceptions=True)
            self._n_starting -= 1
            self.notify()

    async def _none_starts(self) -> None:
        while self._n_starting:
            await self.changed()

    async def _remove(self, replica: Replica, reason: str) -> None:
        """Send an engine no more requests, and kill it."""
        logger.warning("%s is lost, with %d requests in flight: %s", replica.name, replica.pending, reason)
        replica.lose(reason)
        self.notify()
        try:
            if self._registry is not None:
                await self._registry.remove(replica.engine.url)
        finally:
            await replica.engine.kill()


async def gather_all[T](work: Sequence[Awaitable[T]]) -> list[T]:
    """Await all at once; at the first failure cancel the others and raise it."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        raise
