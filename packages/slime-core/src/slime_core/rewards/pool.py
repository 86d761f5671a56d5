"""`RewardPool`: calls a reward in worker processes, so that one that hangs, crashes or takes all memory is one failure."""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from types import TracebackType
from typing import Any

from slime_core.errors import RewardError
from slime_core.rewards.results import (
    Failed,
    Outcome,
    Reward,
    RewardFailure,
    group_values,
    plain_value,
    score_of,
)
from slime_core.rewards.workers.calling import build_reward, explain, import_reward
from slime_core.rewards.workers.process import done_within
from slime_core.rewards.workers.supervisor import RewardWorkers, WorkerSupervisor
from slime_core.rewards.workers.wire import Setup
from slime_core.runtime.closing import close_part
from slime_core.runtime.eager import start_now
from slime_core.runtime.watchdog import line_of
from slime_core.samples import Group, Sample

_CANCEL_S = 1.0


class RewardPool:
    """Scores samples with one reward, each call with a deadline.

    A sync reward runs in worker processes, at most one call each; a call waits for a free worker, and its
    time starts when it has one. A worker that misses a deadline is killed with everything that the reward
    started, and another one takes its place. An async reward runs on the event loop: it may be called many
    times at once, as often as the attribute `connections` of an object says where it has one, and the time of a further call starts
    when it may be called; one that blocks instead of awaiting blocks the trainer too.

    A reward is a function of the sample, or a class that is built once a process from the options and whose
    objects are called with the sample; one on the event loop may have a method `close()`, `async` or not, for the end.
    It is given a copy of the sample, and what it writes there is lost; but one on the event loop whose attribute `writes` is
    True gets the sample itself. A call may be repeated.

    Args:
        reference: the reward, `module:attr`; imported in the workers.
        options: its keyword arguments.
        workers: number of processes.
        timeout_s: deadline of one call (a sample, or under `score_group` a group).
        start_timeout_s: deadline for a worker to start and import the reward.
        memory_bytes: most address space of a worker; a reward that wants more gets a MemoryError.
        workers_of: makes the workers of a reward, so many, where a launcher has them; None for child processes.
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
        workers_of: Callable[[Setup, int], RewardWorkers] | None = None,
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(
                f"workers is {workers} and timeout_s {timeout_s:g}; wanted at least 1 and more than 0"
            )
        self._setup = Setup(
            reference=reference,
            options=dict(options),
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            memory_bytes=memory_bytes,
        )
        self._supervisor: RewardWorkers = (
            WorkerSupervisor(self._setup, size=workers)
            if workers_of is None
            else workers_of(self._setup, workers)
        )
        self._call: Callable[[Any], Any] | None = None
        self._slots: AbstractAsyncContextManager[None] = nullcontext()
        self._state = "new"

    @property
    def is_async(self) -> bool:
        """Whether the reward is async, and so runs on the event loop; known after `start`."""
        return self._call is not None

    async def start(self) -> None:
        """Start the workers and import the reward there.

        Raises:
            PluginError: the reward does not import, or does not take its options.
        """
        try:
            if await self._supervisor.start():
                target = import_reward(self._setup.reference, self._setup.options)
                self._call = build_reward(target, self._setup.options)
                if (most := getattr(self._call, "connections", None)) is not None:
                    self._slots = asyncio.Semaphore(most)
        except BaseException:
            await self.close()
            raise
        self._state = "open"

    async def score(self, sample: Sample) -> Reward | RewardFailure:
        """Score one sample."""
        outcomes, seconds = await self._run(sample, 1)
        return self._result(sample, outcomes[0], seconds)

    async def score_group(self, group: Group) -> list[Reward | RewardFailure]:
        """Score a whole group with one call of a group reward; one result a sample, in order."""
        outcomes, seconds = await self._run(group, len(group))
        each = seconds / max(len(group), 1)
        return [self._result(s, outcome, each) for s, outcome in zip(group, outcomes, strict=True)]

    async def close(self) -> None:
        """Kill the workers and wait for their end; calls in flight raise RewardError. May be called twice."""
        ending, self._state = self._state != "closed", "closed"
        await self._supervisor.close()
        if ending:
            await close_part(self._call)

    async def __aenter__(self) -> RewardPool:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    def _result(self, sample: Sample, outcome: Outcome, seconds: float) -> Reward | RewardFailure:
        if isinstance(outcome, Failed):
            name = sample.name
            what = outcome.what.replace(f": {name}: ", ": ", 1)  # a reward may have named the sample itself
            message = f"{name}: reward {self._setup.reference} {what}"
            return RewardFailure(kind=outcome.kind, message=message)
        return Reward(score=score_of(outcome), value=outcome, seconds=seconds)

    async def _run(self, subject: Sample | Group, count: int) -> tuple[list[Outcome], float]:
        """Return one outcome a sample, and the seconds that the call took."""
        self._check_open()
        if self._call is not None:
            async with self._slots:
                return await self._run_on_loop(self._call, subject, count)
        try:
            payload = pickle.dumps(subject, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # metadata may hold anything
            return [Failed("invalid", f"cannot be sent the sample: {explain(error)}")] * count, 0.0
        try:
            answer = await self._supervisor.answer(payload)
        except asyncio.CancelledError:
            self._check_open()  # the pool was closed, not this call cancelled
            raise
        if isinstance(answer, Failed):
            return [answer] * count, 0.0
        outcomes: list[Outcome] = [
            entry["value"] if "value" in entry else Failed(**entry) for entry in answer["outcomes"]
        ]
        if len(outcomes) == 1:  # of a group that could not be scored at all
            outcomes *= count
        if len(outcomes) != count:  # the worker counts them: a reward wrote this in its place
            garbage = f"crashed: its process sent garbage ({len(outcomes)} outcomes for {count} samples)"
            outcomes = [Failed("crashed", garbage)] * count
        return outcomes, answer["seconds"]

    async def _run_on_loop(
        self, score: Callable[[Any], Any], subject: Sample | Group, count: int
    ) -> tuple[list[Outcome], float]:
        started = time.perf_counter()

        async def call() -> list[Outcome]:
            try:
                returned = await score(subject if getattr(score, "writes", False) else _copy(subject))
                return group_values(returned, count) if isinstance(subject, list) else [plain_value(returned)]
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # SystemExit and KeyboardInterrupt of a reward would end the loop
                return [Failed("raised", f"raised {explain(error)}")] * count

        task = start_now(call())
        timeout_s = self._setup.timeout_s
        try:
            if not task.done() and not await done_within(task, timeout_s):
                what = f"gave no result within {timeout_s:g} s and was cancelled, at {line_of(task)}"
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCEL_S)
                return [Failed("deadline", what)] * count, time.perf_counter() - started
        finally:
            task.cancel()
        if task.cancelled():
            return [Failed("raised", "raised CancelledError: it cancelled itself")] * count, 0.0
        return task.result(), time.perf_counter() - started

    def _check_open(self) -> None:
        if self._state != "open":
            raise RewardError(
                f"reward {self._setup.reference}: its pool is {self._state}; use it between start and close"
            )


def _copy(subject: Sample | Group) -> Sample | Group:
    """Copy what a reward is most likely to write to: the fields themselves, and metadata."""
    if isinstance(subject, list):
        return [_copy_of(sample) for sample in subject]
    return _copy_of(subject)


def _copy_of(sample: Sample) -> Sample:
    copied = copy.copy(sample)
    copied.metadata = copy.deepcopy(sample.metadata) if sample.metadata else {}
    return copied
