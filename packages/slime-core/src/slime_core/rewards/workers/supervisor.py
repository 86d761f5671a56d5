"""`WorkerSupervisor`: gives queued jobs to worker processes in batches, and replaces workers that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from slime_core.errors import PluginError
from slime_core.rewards.results import Failed
from slime_core.rewards.workers.process import WorkerDied, WorkerGarbled, WorkerProcess
from slime_core.rewards.workers.wire import Setup

MAX_BATCH = 16
"""Most jobs that go to a worker at once."""
_SILENCE_S = 4.0

Answer = dict[str, Any] | Failed


@dataclass(frozen=True)
class _Job:
    payload: bytes
    answer: asyncio.Future[Answer]


class RewardWorkers(Protocol):
    """What a pool has run its reward: worker processes of this machine, or those that a launcher has on others."""

    async def start(self) -> bool:
        """Start; returns whether the reward is async, in which case nothing is left to run it.

        Raises:
            PluginError: the reward does not import, or does not take its options.
        """

    async def answer(self, payload: bytes) -> Answer:
        """Run one job, a pickled sample or group, and return its answer."""

    async def close(self) -> None:
        """End them. May be called twice."""


class WorkerSupervisor:
    """Runs jobs on worker processes, each one call at a time. Belongs to one event loop.

    Jobs wait in one queue. A free worker takes an even share of it, at most `MAX_BATCH`, so that the cost of crossing
    processes is shared; each answer is returned as soon as it arrives. A worker's fork server times each call and
    survives it. If the fork server dies too, or is silent for a few seconds because a reward stopped it, the job in
    flight fails and the jobs behind it go to another worker. If a worker sends something that is not a reply, an
    earlier job may have written it: the job in flight is repeated as the first job of a fresh worker, and fails if that
    reply is garbled too.

    Args:
        setup: what the workers run.
        size: number of workers.
    """

    def __init__(self, setup: Setup, *, size: int) -> None:
        self._setup = setup
        self._size = size
        self._queue: deque[_Job] = deque()
        self._filled = asyncio.Condition()
        self._alive: set[WorkerProcess] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> bool:
        """Start the workers; returns whether the reward is async, in which case there are none.

        Raises:
            PluginError: the reward does not import, or does not take its options.
        """
        first, is_async = await self._spawn()
        if is_async:
            self._retire(first)
            return True
        others = await asyncio.gather(*[self._spawn() for _ in range(self._size - 1)])
        for worker in [first, *(worker for worker, _ in others)]:
            self._tasks.add(asyncio.create_task(self._work(worker)))
        return False

    async def answer(self, payload: bytes) -> Answer:
        """Run one job and return its answer; cancelling abandons it."""
        job = _Job(payload, asyncio.get_running_loop().create_future())
        self._queue.append(job)
        async with self._filled:
            self._filled.notify()
        return await job.answer

    async def close(self) -> None:
        """Kill the workers, cancel all jobs, and wait for the processes to end. May be called twice."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for worker in list(self._alive):
            self._retire(worker)
        if self._tasks:
            await asyncio.wait(self._tasks)
        for job in self._queue:
            job.answer.cancel()
        self._queue.clear()
        if self._ending:
            await asyncio.wait(self._ending)

    async def _work(self, worker: WorkerProcess | None) -> None:
        """Run jobs on one worker at a time until the supervisor is closed."""
        again: _Job | None = None
        is_used = False
        while True:
            jobs = deque([again]) if again is not None else await self._take()
            count = len(jobs)
            again = None
            try:
                if worker is None:
                    worker, _ = await self._spawn()
                    is_used = False
                await self._call(worker, jobs)
                is_used = True
            except PluginError as error:
                for job in jobs:
                    _settle(job, Failed("crashed", f"could not be started again: {error}"))
            except (TimeoutError, WorkerDied, asyncio.CancelledError) as end:
                if worker is not None:
                    self._retire(worker)
                worker = None
                if isinstance(end, WorkerGarbled) and jobs and (is_used or len(jobs) < count):
                    again = jobs.popleft()
                    self._queue.extendleft(reversed(jobs))
                    continue
                if self._closed:
                    for job in jobs:
                        job.answer.cancel()
                    raise asyncio.CancelledError from None
                if jobs:
                    why = str(end) or "stopped answering (did the reward stop its parent?)"
                    _settle(jobs.popleft(), Failed("crashed", f"crashed: its process {why}"))
                    self._queue.extendleft(reversed(jobs))

    async def _take(self) -> deque[_Job]:
        """Wait for jobs and return one worker's share of the queue."""
        while True:
            async with self._filled:
                await self._filled.wait_for(lambda: self._queue)
            share = max(1, min(MAX_BATCH, len(self._queue) // (2 * self._size)))
            jobs = [self._queue.popleft() for _ in range(share)]
            if wanted := deque(job for job in jobs if not job.answer.done()):
                return wanted

    async def _call(self, worker: WorkerProcess, jobs: deque[_Job]) -> None:
        """Run jobs on the worker in order, removing each when it is answered; the first of `jobs` is in flight.

        Raises:
            CancelledError: all remaining jobs were cancelled.
        """
        payload = pickle.dumps([job.payload for job in jobs], protocol=pickle.HIGHEST_PROTOCOL)
        given = tuple(jobs)

        def hear(reply: dict[str, Any]) -> None:
            if not reply.keys() & {"failed", "outcomes"}:
                raise ValueError("a reply without outcomes")
            _settle(jobs.popleft(), Failed(*reply["failed"]) if "failed" in reply else reply)

        call = asyncio.create_task(worker.stream(payload, len(jobs), hear, timeout_s=_SILENCE_S))

        def give_up(_: asyncio.Future[Answer]) -> None:
            if jobs and all(job.answer.done() for job in jobs):
                call.cancel()

        for job in given:
            job.answer.add_done_callback(give_up)
        try:
            await call
        finally:
            call.cancel()
            for job in given:
                job.answer.remove_done_callback(give_up)

    async def _spawn(self) -> tuple[WorkerProcess, bool]:
        worker, is_async = await WorkerProcess.start(self._setup)
        self._alive.add(worker)
        if self._closed:
            self._retire(worker)
        return worker, is_async

    def _retire(self, worker: WorkerProcess) -> None:
        """Kill a worker; its end is awaited in the background, and by `close`."""
        if worker in self._alive:
            self._alive.discard(worker)
            worker.doom()
            task = asyncio.create_task(worker.kill())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


def _settle(job: _Job, answer: Answer) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # given up meanwhile
        job.answer.set_result(answer)
