"""`Crew`: the workers of a pool, each busy with a batch of the jobs that wait."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections import deque
from dataclasses import dataclass
from typing import Any

from slime_core.errors import PluginError
from slime_core.rewards.frames import Setup
from slime_core.rewards.process import WorkerDied, WorkerProcess
from slime_core.rewards.results import Failed

MAX_BATCH = 16
"""Most jobs that go to a worker at once."""
_SILENCE_S = 4.0

Answer = dict[str, Any] | Failed


@dataclass(frozen=True)
class _Job:
    payload: bytes
    answer: asyncio.Future[Answer]


class Crew:
    """Processes that answer jobs, each one call at a time. Belongs to one event loop.

    Jobs wait in one line. A free worker takes an even share of it, at most `MAX_BATCH`, so that the trip to another
    process is paid for once; each answer comes as soon as there is one. A worker's keeper times each call by itself
    and survives what a call does; should the keeper go as well, or say nothing for a few seconds because a reward
    stopped it, the job that was under way fails, and those behind it go to another worker.

    Args:
        setup: what the workers run.
        size: number of workers.
    """

    def __init__(self, setup: Setup, *, size: int) -> None:
        self._setup = setup
        self._size = size
        self._line: deque[_Job] = deque()
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
        """Have one job answered; cancelling gives it up."""
        job = _Job(payload, asyncio.get_running_loop().create_future())
        self._line.append(job)
        async with self._filled:
            self._filled.notify()
        return await job.answer

    async def close(self) -> None:
        """Kill the workers, give up all jobs, and wait for the end. May be called twice."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for worker in list(self._alive):
            self._retire(worker)
        if self._tasks:
            await asyncio.wait(self._tasks)
        for job in self._line:
            job.answer.cancel()
        self._line.clear()
        if self._ending:
            await asyncio.wait(self._ending)

    async def _work(self, worker: WorkerProcess | None) -> None:
        """Serve jobs by one worker at a time, for as long as the crew is open."""
        while True:
            jobs = await self._take()
            try:
                if worker is None:
                    worker, _ = await self._spawn()
                await self._call(worker, jobs)
            except PluginError as error:
                for job in jobs:
                    _settle(job, Failed("crashed", f"could not be started again: {error}"))
            except (TimeoutError, WorkerDied, asyncio.CancelledError) as end:
                if worker is not None:
                    self._retire(worker)
                worker = None
                if self._closed:
                    for job in jobs:
                        job.answer.cancel()
                    raise asyncio.CancelledError from None
                if jobs:
                    why = str(end) or "stopped answering (did the reward stop its parent?)"
                    _settle(jobs.popleft(), Failed("crashed", f"crashed: its process {why}"))
                    self._line.extendleft(reversed(jobs))

    async def _take(self) -> deque[_Job]:
        """Wait for jobs and return a worker's share of the line."""
        while True:
            async with self._filled:
                await self._filled.wait_for(lambda: self._line)
            share = max(1, min(MAX_BATCH, len(self._line) // (2 * self._size)))
            jobs = [self._line.popleft() for _ in range(share)]
            if wanted := deque(job for job in jobs if not job.answer.done()):
                return wanted

    async def _call(self, worker: WorkerProcess, jobs: deque[_Job]) -> None:
        """Have the worker answer jobs in order, and take each that is answered off; the first is under way.

        Raises:
            CancelledError: all that were left have been given up.
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
