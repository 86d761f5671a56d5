"""`Dispatcher`: everything between a prompt that was taken and the batch of groups that a step trains on."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from slime_core.data.buffers import groups_from_json, groups_to_json
from slime_core.errors import DataError, SampleError, SlimeError
from slime_core.protocols import Metrics, WeakReason
from slime_core.rollout.abortable import AbortableEngine
from slime_core.rollout.admission import Admission, Job, Jobs, Waves
from slime_core.rollout.context import RolloutRun
from slime_core.rollout.group import fail_without_room, fresh, mask_so_far, oldest_version, run_group
from slime_core.rollout.user_hooks import KEPT_DESPITE
from slime_core.rundir.events import DISPATCHER
from slime_core.runtime.busy import Busy
from slime_core.runtime.deadline import within
from slime_core.runtime.eager import start_now
from slime_core.samples import Group, Status
from slime_core.samples.copies import copied


class Dispatcher:
    """Takes prompts, generates, scores and filters them, and returns the groups of one step after the other.

    What was taken and not trained on is its state, and part of a checkpoint: no prompt is lost. Belongs to one event loop.

    Args:
        run: whose prompts, generator, rewards and filter it uses.
        last_step: last step of the run.
    """

    def __init__(self, run: RolloutRun, *, last_step: int) -> None:
        self._run, self._section = run, run.settings.rollout
        self.admission: Admission = Waves(
            wave=run.sizes.over_sampling_batch_size,
            in_completion_order=self._section.rollout_in_completion_order,
            max_staleness=self._section.max_staleness,
        )
        """When it takes prompts, and which groups a step gets; a loop may choose another before the first step."""
        self.jobs = Jobs(batch_size=run.sizes.rollout_batch_size, last_step=last_step)
        """Where all groups are."""
        self._engine = AbortableEngine(run.engine, run.concurrency)
        self._over = asyncio.Event()
        """Set where the groups in flight are surplus; not where their requests alone are ended."""
        self._tasks: dict[asyncio.Task[Group], Job] = {}
        self._queue: list[tuple[int, int, asyncio.Task[Group]]] = []
        """What is decided on next, a heap: tasks in flight by their prompts, or finished ones as they finished."""
        self._waiting: list[Job] = []
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._drops: Counter[str] = Counter()
        self._failure: str | None = None
        self._waves = 0
        self._is_open = False
        self._context: contextvars.Context | None = None
        """That of groups which stay in flight from one step to the next: they are under no step's deadline."""
        self._busy = Busy()
        run.concurrency.when_none_waits = self._let_go_on

    def busy_s(self) -> float:
        """Return the seconds since the last call in which groups were being generated or scored."""
        return self._busy.take()

    def depth(self) -> Metrics:
        """Return how many groups are in flight, and how many wait to be trained on; empty if no step leaves any."""
        if not self.admission.carries:
            return {}
        return {
            "rollout/groups_in_flight": float(len(self._tasks)),
            "rollout/groups_waiting": float(len(self.jobs.kept)),
        }

    def weights_arrived(self, version: int) -> None:
        """Say that the engine has weights of another version: what is submitted from now on counts from it."""
        self.jobs.version = version
        self._tell("weights_arrived", version=version)
        if self._is_open:
            self._advance()

    async def next(self, step: int) -> list[Group]:
        """Return the groups that a step trains on, in the order of their prompts; they stay in the state until `arrived`.

        Raises:
            DataError: the filter dropped so much that `dynamic_sampling_max_waves` waves did not fill the batch.
            RewardError: a reward failed and `on_reward_error` is `stop`.
            SampleError: a generator or the filter failed; names the sample.
        """
        self.jobs.next_step, self._is_open = step, True
        self._tell("groups_wanted", step=step)
        try:
            self._advance()
            while (batch := self._batch()) is None:
                self._changed.clear()
                await self._changed.wait()
            batch = sorted(batch, key=lambda job: job.prompt)
            self._tell("step_filled", step=step, numbers=[job.number for job in batch])
            taken = set(map(id, batch))
            self.jobs.kept = [job for job in self.jobs.kept if id(job) not in taken]
            self.jobs.handed_over += batch
            self.jobs.next_step, self._waves, self._failure = step + 1, 0, None
            self._drops.clear()
            if self.admission.carries:
                self._advance()
            else:
                await self.stop()
        except BaseException:
            self._cancel()
            raise
        return [job.group for job in batch]

    def arrived(self) -> None:
        """Say that the groups that `next` returned are in the state of whoever asked for them, and no longer in this one."""
        self.jobs.handed_over.clear()

    async def stop(self) -> None:
        """End the requests in flight; their groups go to the buffer (see `RolloutRun.keep_for_later`)."""
        self._is_open = False
        self._over.set()
        try:
            jobs, groups = await self._end_requests()
        finally:
            self._over = asyncio.Event()
        if groups:
            self._tell("groups_put_back", numbers=[job.number for job in jobs])
            self._run.keep_for_later(groups, given=[job.given for job in jobs])
        self.jobs.undecided.difference_update(jobs)

    @asynccontextmanager
    async def interrupted(self) -> AsyncIterator[None]:
        """End the requests in flight before the block, and go on from their tokens after it (see `mask_so_far`).

        Raises:
            DeadlineError: a generator did not return within `rollout_timeout_s`.
        """
        is_open, self._is_open = self._is_open, False
        ending = self._end_requests()
        what = f"weights of step {self.jobs.next_step - 1}: ending what is in flight (--rollout-timeout-s)"
        jobs, groups = await within(self._section.rollout_timeout_s, what, ending, waits_for_others=True)
        for job, group in zip(jobs, groups, strict=True):
            job.is_finished = all(sample.status is not Status.ABORTED for sample in group)
            if not job.is_finished:
                mask_so_far([group], self._section)
            job.given, job.group = copied(group), group
        self._tell("groups_interrupted", numbers=[job.number for job in jobs])
        yield
        self._waiting += jobs
        self._is_open = is_open
        if is_open:
            self._advance()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Generate beside the block; what is in flight at its end goes to the buffer, or is cancelled where it failed."""
        self._context = contextvars.copy_context()
        try:
            yield
            await self.stop()
        finally:
            self._cancel()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return what makes JSON values of the present state: finished groups, and all others as they were submitted.

        What is returned raises CheckpointError where a sample holds a value without a JSON form; it names sample and field.
        """
        done = [*self.jobs.handed_over, *self.jobs.kept]
        finished = set(map(id, done))
        jobs = sorted([*done, *self.jobs.undecided], key=lambda job: job.number)
        held = [
            (job.version, id(job) in finished, job.group if id(job) in finished else job.given)
            for job in jobs
        ]

        def state() -> dict[str, Any]:
            groups = groups_to_json(group for _, _, group in held)
            return {
                "groups": [
                    {"version": version, "finished": is_finished, "samples": samples}
                    for (version, is_finished, _), samples in zip(held, groups, strict=True)
                ]
            }

        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on the state of a checkpoint: finished groups wait to be trained on, all others are generated first."""
        for entry in state["groups"]:
            (group,) = groups_from_json([entry["samples"]])
            job = self._job(group, version=int(entry["version"]))
            self._tell_of("group_restored", job, version=job.version, finished=bool(entry["finished"]))
            if entry["finished"]:
                self.jobs.kept.append(job)
            else:
                self.jobs.undecided.add(job)
                self._waiting.append(job)

    def _batch(self) -> list[Job] | None:
        if self._error is not None:
            raise self._error
        for job in self.admission.expired(self.jobs):
            self.jobs.kept.remove(job)
            self._drop(job, "stale")
            self._advance()
        return self.admission.batch(self.jobs)

    def _advance(self) -> None:
        """Decide on groups as far as that is possible now, and submit others; an error is for `next` to raise."""
        try:
            self._admit()
            while (job := self._decidable()) is not None:
                self._decide(job)
                self._admit()
        except BaseException as error:
            self._error = self._error or error

    def _admit(self) -> None:
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._start(job)
        while n := min(self.admission.wanted(self.jobs), self._room()):
            self._count_wave()
            for group in self._run.take(int(n)):
                version = oldest_version(group, default=self.jobs.version)
                if not self.admission.accepts(version, self.jobs):
                    group, version = fresh(group), self.jobs.version
                job = self._job(group, version=version)
                self.jobs.undecided.add(job)
                self._start(job)

    def _room(self) -> float:
        """Return how many groups may be submitted now.

        Where groups are in flight all the time, one that would only wait for the run's limit is not submitted: it counts from
        the weights that the engine has when it is. The last one that is may wait, so that there is always a next request.
        """
        limit = self._run.concurrency
        if limit.limit is None or not self.admission.carries:
            return math.inf
        return 0 if limit.holds_back else 1

    def _let_go_on(self) -> None:
        """Submit more, in the event loop's next turn: it may be inside a request that somebody ends."""
        if self._is_open and self.admission.carries:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._is_open:
            self._advance()
            self._changed.set()

    def _count_wave(self) -> None:
        """Refuse to take more prompts for a step whose filter has dropped as many as the most waves hold."""
        most = self._section.dynamic_sampling_max_waves
        dropped = self._drops.total() // self._run.sizes.over_sampling_batch_size
        if (dropped if self.admission.carries else self._waves) >= most:
            raise DataError(self._starved(most))
        self._waves += 1

    def _job(self, group: Group, *, version: int) -> Job:
        return Job(number=next(self._numbers), version=version, given=copied(group), group=group)

    def _start(self, job: Job) -> None:
        run = self._run
        # finished while requests of others were being ended, or failed before any
        if job.is_finished or fail_without_room(run, job.group):
            work = _as_it_is(job.group)
        else:
            params_of, engine = run.sampling_params, self._engine
            work = run_group(run, job.group, params_of=params_of, engine=engine, over=self._over)
        job.is_finished = False
        self._tell_of("group_submitted", job, version=job.version)
        context = None if self._context is None else self._context.copy()
        task = start_now(work, context=context)  # now, so that its requests are in line, or in flight
        self._tasks[task] = job
        self._busy.add(1)
        task.add_done_callback(lambda _: self._busy.add(-1))
        if not self.admission.in_completion_order and not self.admission.carries:
            heapq.heappush(self._queue, (job.prompt, job.number, task))
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Group]) -> None:
        job = self._tasks.get(task)
        if job is None:  # it was taken out: somebody else waits for it
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._tell_of("group_finished" if error is None else "group_failed", job)
        self._error = self._error or error  # a failure need not wait for its turn
        if error is None:
            job.is_finished = True
            if self.admission.in_completion_order or self.admission.carries:
                heapq.heappush(self._queue, (0, next(self._numbers), task))
            self._advance()
        self._changed.set()

    def _decidable(self) -> Job | None:
        """Return the next finished group to decide on; None if there is none, or what finishes now is left over."""
        is_full = not self.admission.carries and len(self.jobs.kept) >= self.jobs.batch_size
        if not self._is_open or is_full or not self._queue or not self._tasks[self._queue[0][2]].is_finished:
            return None
        _, _, task = heapq.heappop(self._queue)
        job = self._tasks.pop(task)
        job.group = task.result()
        return job

    def _decide(self, job: Job) -> None:
        reason = self._reason(job.group)
        self.jobs.undecided.remove(job)  # not before: a group whose filter raises stays in the state
        if isinstance(reason, WeakReason) and len(self.jobs) < self.jobs.batch_size:
            for sample in job.group:
                sample.metadata[KEPT_DESPITE] = str(reason)
            reason = None
        if reason is None:
            self.jobs.kept.append(job)
            self._tell_of("group_kept", job)
        else:
            self._drop(job, reason)
        n = self.jobs.batch_size
        self._run.report("rollout", min(len(self.jobs.kept), n), n)

    def _drop(self, job: Job, reason: str) -> None:
        self._drops[reason] += 1
        self._tell_of("group_dropped", job, reason=reason, step=self._run.generating_step)
        self._run.record_drop(job.group, reason)
        failures = (sample.failure for sample in job.group if sample.failure)
        self._failure = self._failure or next(failures, None)

    def _tell(self, name: str, **more: Any) -> None:
        self._run.events.moment(name, lane=DISPATCHER, **more)

    def _tell_of(self, name: str, job: Job, **more: Any) -> None:
        self._tell(name, number=job.number, group=job.group[0].group_index, **more)

    def _reason(self, group: Group) -> str | None:
        """Ask the filter; whatever else it raises becomes an error that names the group's first sample."""
        try:
            return self._run.drop_reason(group)
        except (SlimeError, GeneratorExit):
            raise
        except BaseException as error:
            what = f"the filter {self._section.dynamic_sampling_filter_path}"
            raise SampleError(f"{group[0].name}: {what} raised {type(error).__name__}: {error}") from error

    async def _end_requests(self) -> tuple[list[Job], list[Group]]:
        """Abort what is in flight; returns the jobs in the order of their prompts, and their groups as far as they are."""
        tasks = dict(sorted(self._tasks.items(), key=lambda item: item[1].prompt))
        self._tasks, self._queue = {}, []
        try:
            if tasks:
                await self._engine.abort()
            groups = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        self._engine = AbortableEngine(self._run.engine, self._run.concurrency)
        return list(tasks.values()), groups

    def _cancel(self) -> None:
        """Cancel what is in flight. Its groups stay in the state, as they were submitted."""
        self._is_open = False
        tasks, self._tasks, self._queue = self._tasks, {}, []
        for task in tasks:
            task.cancel()

    def _starved(self, most: int) -> str:
        step, kept, target, drops = (
            self.jobs.next_step,
            len(self.jobs.kept),
            self.jobs.batch_size,
            self._drops,
        )
        reasons = ", ".join(f"{reason}: {count}" for reason, count in drops.most_common(5))
        todo = "loosen the filter, change the data, or raise --dynamic-sampling-max-waves"
        if self._failure is not None:
            mend = f"mend the reward, whose first failure is: {self._failure}"
            todo = mend if len(drops) == 1 else f"{todo}, or {mend}"
        return f"step {step}: after {most} waves of sampling {kept} of {target} groups are kept; dropped: {reasons or 'none'}; {todo}"


async def _as_it_is(group: Group) -> Group:
    """Return a group that is generated and scored, or failed."""
    return group
