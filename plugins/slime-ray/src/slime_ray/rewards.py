"""Workers of rewards on machines of the cluster: `RewardHost`, the Ray actor that has those of one, and `RayRewardWorkers`, all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from slime_core.errors import RewardError
from slime_core.plugins.registry import Registry
from slime_core.rewards.results import Failed
from slime_core.rewards.workers.supervisor import Answer, WorkerSupervisor
from slime_core.rewards.workers.wire import Setup
from slime_core.runtime.calls import Callee, calling
from slime_core.runtime.deadline import within

from slime_ray.process.ends import still_running
from slime_ray.process.failure import Failure, killed_for_memory
from slime_ray.process.lock import Lock, check_lock
from slime_ray.process.surroundings import Surroundings, allowed_plugins, begin_log, move_in

logger = logging.getLogger(__name__)

#: How often a call is repeated whose host was lost, each time on one that is there.
_REPEATS = 2
#: Seconds between two questions whether a host that was lost is there again; twice as many after each start that failed, up to a limit.
_POLL_S, _LONGEST_POLL_S = 0.5, 30.0
_STARTING = "launcher ray: starting the workers of a reward"
#: Most calls that wait at one host.
_WAITING = 10_000
#: Seconds in which a host that is killed is gone.
_GONE_S = 5.0


@dataclass(frozen=True)
class NotStarted:
    """What a host answers whose process took the place of one that was lost, and whose workers do not start there."""

    failure: Failure


class RewardHost:
    """The workers of one reward on one machine. One that is lost comes again, perhaps on another machine.

    Args:
        surroundings: of this process.
        setup: what its workers run.
        size: number of workers.
    """

    def __init__(self, surroundings: Surroundings, setup: Setup, size: int) -> None:
        move_in(surroundings)
        begin_log(surroundings.log)
        self._new_workers = partial(WorkerSupervisor, setup, size=size)
        self._workers = self._new_workers()
        self._started: asyncio.Task[bool] | None = None
        # A loop of its own: Ray's may be one that starts processes only where it is the main thread's.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="workers", daemon=True).start()

    async def start(self, lock: Lock) -> tuple[str, int, bool] | Failure:
        """Start the workers, if the driver's plugins are here, which `lock` has; returns the IP address of this machine, the process id, and whether the reward is async."""
        try:
            await asyncio.to_thread(lambda: check_lock(Registry.from_environment(), lock))
            is_async = await self._there(self._start)
        except Exception as error:
            return Failure.of(error)
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it so
        return address, os.getpid(), is_async

    async def start_again(self) -> Failure | None:
        """Start the workers where this process takes the place of one that was lost; returns why they do not."""
        try:
            await self._there(self._start)
        except Exception as error:
            return Failure.of(error)
        return None

    async def answer(self, payload: bytes) -> Answer | NotStarted | Failure:
        """Run one job, and return its answer."""
        # This process may take the place of one that was lost while nobody asked it.
        if (failure := await self.start_again()) is not None:
            return NotStarted(failure)
        try:
            answer: Answer = await self._there(lambda: self._workers.answer(payload))
        except Exception as error:
            return Failure.of(error)
        return answer

    async def _start(self) -> bool:
        if self._started is None:
            self._started = asyncio.ensure_future(self._start_workers())
        return await asyncio.shield(self._started)

    async def _start_workers(self) -> bool:
        """Start the workers; where that fails, none is left, and whoever asks next has it tried again."""
        workers = self._workers
        try:
            return await workers.start()
        except BaseException:
            self._workers, self._started = self._new_workers(), None
            await workers.close()
            raise

    async def _there(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))


@dataclass
class _Host:
    """One host, as the driver has it."""

    name: str
    actor: Any
    waiting: int = 0
    """Calls in flight."""
    asked: int = 0
    """Which call of all was its last."""
    coming_back: asyncio.Task[None] | None = None
    """Ends when it is there again after it was lost."""

    @property
    def is_there(self) -> bool:
        """Whether it takes calls."""
        return self.coming_back is None or self.coming_back.done()

    def lose(self, why: object) -> None:
        """Send no calls there until it is back; it may never be, as where its machine is lost and no other has room."""
        if self.is_there:
            logger.warning("%s was lost (%s); others have its calls meanwhile", self.name, why)
            self.coming_back = asyncio.create_task(self._come_back())

    async def _come_back(self) -> None:
        told, wait_s = "", _POLL_S
        while True:
            try:
                failure = await self.actor.start_again.remote()
                if failure is None:
                    logger.warning("%s is back", self.name)
                    return
                if (why := str(failure.error(self.name))) != told:
                    logger.warning(told := why)
                wait_s = min(2 * wait_s, _LONGEST_POLL_S)
            except RayError as error:
                logger.debug("%s is not back: %s", self.name, error)
                wait_s = _POLL_S
            await asyncio.sleep(wait_s)


class RayRewardWorkers:
    """Workers of one reward on several machines. It is a `slime_core.rewards.workers.supervisor.RewardWorkers`.

    Args:
        setup: what they run.
        size: number of workers of each machine.
        lock: returns the plugins of the driver, once it has resolved them all.
        options: of the actor of each machine.
        log: of each machine's actor, by number.
        timeout_s: deadline of the start, and of a host to come back where all are lost, seconds.
        watch: is told of those that are processes of this machine.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        size: int,
        lock: Callable[[], Lock],
        options: list[dict[str, Any]],
        log: Callable[[int], Path],
        timeout_s: float,
        watch: Callable[[list[int]], None],
    ) -> None:
        self._setup, self._size, self._options, self._log = setup, size, options, log
        self._lock, self._timeout_s, self._watch = lock, timeout_s, watch
        self._hosts: list[_Host] = []
        self._n_calls = 0
        self._here: list[int] = []

    async def start(self) -> bool:
        """Start them; returns whether the reward is async, in which case there are none.

        Raises:
            PluginError: the reward does not import, or does not take its options, on one of the machines, or plugins differ there.
            RewardError: a machine is lost.
            DeadlineError: they did not start in time: others may have the cores.
        """
        self._hosts = [_Host(self._name(number), self._begin(number)) for number in range(len(self._options))]
        lock = self._lock()
        starting = asyncio.gather(*(host.actor.start.remote(lock) for host in self._hosts))
        try:
            found = await within(self._timeout_s, f"{_STARTING} (--ray-start-timeout-s)", starting)
        except RayError as error:
            raise RewardError(f"{_STARTING}: {killed_for_memory(error) or error}") from error
        for number, one in enumerate(found):
            if isinstance(one, Failure):
                raise one.error(self._name(number))
        own = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it so
        self._here = [pid for address, pid, _ in found if address == own]
        self._watch(self._here)
        is_async = any(one[2] for one in found)
        if is_async:
            await self.close()
        return is_async

    async def answer(self, payload: bytes) -> Answer:
        """Run one job on the host with the fewest, and return its answer; on another one where that is lost meanwhile, or its workers do not
        start again."""
        why: object = ""
        for _ in range(_REPEATS + 1):
            host = await self._least_busy()
            if host is None:
                return Failed(
                    "crashed",
                    f"was lost with all of its machines (none was back after {self._timeout_s:g} s, --ray-start-timeout-s)",
                )
            self._n_calls += 1
            host.asked = self._n_calls
            host.waiting += 1
            try:
                with calling("a reward", Callee(host.name, _nothing)):
                    answer: Answer | NotStarted | Failure = await host.actor.answer.remote(payload)
            except RayError as error:
                why = killed_for_memory(error) or error
            else:
                if isinstance(answer, Failure):
                    raise answer.error(host.name)
                if not isinstance(answer, NotStarted):
                    return answer
                why = answer.failure.text
            finally:
                host.waiting -= 1
            if not self._hosts:  # closed
                break
            host.lose(why)
        return Failed("crashed", f"was lost with its machine, {_REPEATS + 1} times: {why}")

    async def _least_busy(self) -> _Host | None:
        """Wait until a host is there, and return that with the fewest calls, in turns where they are even; None where none comes back in time."""
        back = [host.coming_back for host in self._hosts if host.coming_back is not None]
        if back and not any(host.is_there for host in self._hosts):
            await asyncio.wait(back, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        there = [host for host in self._hosts if host.is_there]
        return min(there, key=lambda host: (host.waiting, host.asked), default=None)

    async def close(self) -> None:
        """Kill them; jobs in flight fail. May be called twice."""
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            if host.coming_back is not None:
                host.coming_back.cancel()
            # The trainer may have left the cluster, and the hosts are gone with it; `ray.kill` would join or start another.
            if ray.is_initialized():
                with contextlib.suppress(RayError):
                    ray.kill(host.actor)
        await still_running(self._here, _GONE_S)

    def _begin(self, number: int) -> Any:
        surroundings = Surroundings(
            folder=Path.cwd(),
            import_path=tuple(sys.path),
            environment=allowed_plugins(),
            log=self._log(number),
            sharing=self._size,
        )
        # Calls are not repeated by Ray, which would have them wait for a host that may never be back.
        options = {"max_restarts": -1, "max_concurrency": _WAITING, "num_cpus": 0}
        host = ray.remote(RewardHost).options(**options, **self._options[number])
        return host.remote(surroundings, self._setup, self._size)

    def _name(self, number: int) -> str:
        return f"reward host {number} of {len(self._options)}, whose log is {self._log(number)}"


async def _nothing() -> str:
    return ""  # a worker that misses its deadline is asked by its own supervisor, which says where it is
