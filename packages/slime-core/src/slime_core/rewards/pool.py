"""`RewardPool`: calls a reward in processes that may hang, crash and eat memory; the trainer goes on."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from slime_core.errors import PluginError, RewardError
from slime_core.rewards.calling import explain, load_reward
from slime_core.rewards.process import WorkerDied, WorkerProcess, done_within
from slime_core.rewards.results import (
    Failed,
    Outcome,
    Reward,
    RewardFailure,
    group_values,
    plain_value,
    score_of,
)
from slime_core.sample import Group, Sample

_CANCEL_S = 1.0


class RewardPool:
    """Scores samples with one reward, each call with a deadline.

    A sync reward runs in worker processes, at most one call each; a call waits for a free worker, and its
    time starts when it has one. A worker that misses a deadline is killed with everything that the reward
    started, and another one takes its place when there is work. An async reward runs on the event loop: it
    may be called many times at once, and one that blocks instead of awaiting blocks the trainer too.

    A reward is a pure function: it is given a copy of the sample, and what it writes there is lost.

    Args:
        reference: the reward, `module:attr`; imported in the workers.
        options: its keyword arguments.
        workers: number of processes.
        timeout_s: deadline of one call (a sample, or under `score_group` a group).
        start_timeout_s: deadline for a worker to start and import the reward.
        memory_bytes: most address space of a worker; a reward that wants more gets a MemoryError.
    """

    def __init__(
        self,
        reference: str,
        options: Mapping[str, Any],
        *,
        workers: int,
        timeout_s: float,
        start_timeout_s: float = 120.0,
        memory_bytes: int | None = None,
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(
                f"workers is {workers} and timeout_s {timeout_s:g}; wanted at least 1 and more than 0"
            )
        self._reference = reference
        self._options = dict(options)
        self._setup = pickle.dumps((reference, self._options, memory_bytes))
        self._n_workers = workers
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._function: Callable[..., Any] | None = None
        self._slots = asyncio.Semaphore(workers)
        self._alive: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._ending: set[asyncio.Task[Any]] = set()
        self._state = "new"

    @property
    def is_async(self) -> bool:
        """Whether the reward is async, and so runs on the event loop; known after `start`."""
        return self._function is not None

    async def start(self) -> None:
        """Start the workers and import the reward there.

        Raises:
            PluginError: the reward does not import, or does not take its options.
        """
        try:
            first, is_async = await self._spawn()
            if is_async:
                self._retire(first)
                self._function = load_reward(self._reference, self._options)
            else:
                others = await asyncio.gather(*[self._spawn() for _ in range(self._n_workers - 1)])
                self._idle += [first, *(worker for worker, _ in others)]
        except BaseException:
            await self.close()
            raise
        self._state = "open"

    async def score(self, sample: Sample) -> Reward | RewardFailure:
        """Score one sample."""
        outcomes, seconds = await self._run(sample, 1)
        return self._result(sample.name, outcomes[0], seconds)

    async def score_group(self, group: Group) -> list[Reward | RewardFailure]:
        """Score a whole group with one call of a group reward; one result a sample, in order."""
        outcomes, seconds = await self._run(group, len(group))
        each = seconds / max(len(group), 1)
        return [self._result(s.name, outcome, each) for s, outcome in zip(group, outcomes, strict=True)]

    async def close(self) -> None:
        """Kill the workers and wait for their end; calls under way raise RewardError. May be called twice."""
        self._state = "closed"
        for worker in list(self._alive):
            self._retire(worker)
        self._idle.clear()
        if self._ending:
            await asyncio.wait(self._ending)

    async def __aenter__(self) -> RewardPool:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    def _result(self, name: str, outcome: Outcome, seconds: float) -> Reward | RewardFailure:
        if isinstance(outcome, Failed):
            return RewardFailure(
                kind=outcome.kind, message=f"{name}: reward {self._reference} {outcome.what}"
            )
        return Reward(score=score_of(outcome), value=outcome, seconds=seconds)

    async def _run(self, subject: Sample | Group, count: int) -> tuple[list[Outcome], float]:
        """Return one outcome a sample, and the seconds that the call took."""
        if self._function is not None:
            self._check_open()
            return await self._run_on_loop(self._function, subject, count)
        try:
            payload = pickle.dumps(subject, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # metadata may hold anything
            return [Failed("invalid", f"cannot be sent the sample: {explain(error)}")] * count, 0.0
        async with self._slots:
            self._check_open()
            answer = await self._run_in_worker(payload)
        if isinstance(answer, Failed):
            self._check_open()
            return [answer] * count, 0.0
        outcomes: list[Outcome] = [
            entry["value"] if "value" in entry else Failed(**entry) for entry in answer["outcomes"]
        ]
        return outcomes * count if len(outcomes) < count else outcomes, answer["seconds"]

    async def _run_in_worker(self, payload: bytes) -> dict[str, Any] | Failed:
        worker = None
        answer = None
        try:
            worker = self._idle.pop() if self._idle else (await self._spawn())[0]
            answer = await worker.call(payload, timeout_s=self._timeout_s)
        except TimeoutError:
            return Failed("deadline", f"gave no result within {self._timeout_s:g} s and was killed")
        except WorkerDied as death:
            return Failed("crashed", f"crashed: its process {death}")
        except PluginError as error:
            return Failed("crashed", f"could not be started again: {error}")
        finally:
            if worker is not None and answer is not None:
                self._idle.append(worker)
            elif worker is not None:  # also when this call is cancelled
                self._retire(worker)
        return answer

    async def _run_on_loop(
        self, function: Callable[..., Any], subject: Sample | Group, count: int
    ) -> tuple[list[Outcome], float]:
        started = time.perf_counter()

        async def call() -> list[Outcome]:
            try:
                returned = await function(_copy(subject), **self._options)
                return group_values(returned, count) if isinstance(subject, list) else [plain_value(returned)]
            except (
                Exception,
                SystemExit,
            ) as error:  # a reward may raise anything; SystemExit would end the loop
                return [Failed("raised", f"raised {explain(error)}")] * count

        task = asyncio.create_task(call())
        try:
            if not await done_within(task, self._timeout_s):
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCEL_S)
                failed = Failed("deadline", f"gave no result within {self._timeout_s:g} s and was cancelled")
                return [failed] * count, time.perf_counter() - started
        finally:
            task.cancel()
        if task.cancelled():
            return [Failed("raised", "raised CancelledError: it cancelled itself")] * count, 0.0
        return task.result(), time.perf_counter() - started

    async def _spawn(self) -> tuple[WorkerProcess, bool]:
        worker, is_async = await WorkerProcess.start(
            self._reference, self._setup, timeout_s=self._start_timeout_s
        )
        self._alive.add(worker)
        if self._state == "closed":
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

    def _check_open(self) -> None:
        if self._state != "open":
            raise RewardError(
                f"reward {self._reference}: its pool is {self._state}; use it between start and close"
            )


def _copy(subject: Sample | Group) -> Sample | Group:
    """Copy what a reward is most likely to write to: the fields themselves, and metadata."""
    if isinstance(subject, list):
        return [dataclasses.replace(s, metadata=copy.deepcopy(s.metadata)) for s in subject]
    return dataclasses.replace(subject, metadata=copy.deepcopy(subject.metadata))
