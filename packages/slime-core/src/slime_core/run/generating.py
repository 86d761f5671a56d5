"""`GeneratingHalf`: the half of a run from its prompts to the groups of a step; the other half is `run.run.Run`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from slime_core.checks.loops import other_rollout, shared_devices, too_young
from slime_core.config.derive import BatchSizes
from slime_core.config.settings import Settings
from slime_core.data.mixed_source import MixedSource
from slime_core.data.prompt_source import PromptSource
from slime_core.errors import ConfigError, RolloutTimeout
from slime_core.plugins.registry import Registry
from slime_core.protocols import (
    Buffer,
    DataSource,
    EvalFn,
    GenerateFn,
    Metrics,
    RolloutEngine,
    SamplingParams,
    Tokenizer,
)
from slime_core.rewards.scorer import Scorer
from slime_core.rollout.admission import Bounded
from slime_core.rollout.concurrency import ConcurrencyLimit
from slime_core.rollout.context import RolloutFn
from slime_core.rollout.dispatcher import Dispatcher
from slime_core.rollout.execution import check_groups
from slime_core.rollout.given_metrics import given_metrics
from slime_core.rollout.group import common_params, leftovers, score, training_params
from slime_core.rollout.rollouts.default import rollout
from slime_core.rollout.user_hooks import BUFFER_FILTER, TAKEN_BY_HOOK, RolloutHooks
from slime_core.run.step_record import StepRecord, ahead_from_json, ahead_to_json
from slime_core.run.template_day import DAY
from slime_core.rundir.events import ROLLOUT, EventLog
from slime_core.runtime.deadline import within
from slime_core.samples import Group, Sample

#: Makes the state of everything but the trainer, as JSON values.
Snapshot = Callable[[], dict[str, Any]]


@dataclass(kw_only=True)
class GeneratingHalf(ABC):
    """The parts of a run that make samples, and what rollout functions use of it (`rollout.context.RolloutRun`)."""

    settings: Settings
    registry: Registry
    tokenizer: Tokenizer
    source: DataSource
    buffer: Buffer
    engine: RolloutEngine
    generate: GenerateFn
    scorer: Scorer | None
    sizes: BatchSizes
    num_steps: int
    rollout_fn: RolloutFn
    """The whole rollout of a step."""
    eval_fn: EvalFn | None = None
    """The whole evaluation, where a user has a function of his own."""
    drop_reason: Callable[[Group], str | None]
    """The dynamic sampling filter, its options bound."""
    events: EventLog = field(default_factory=EventLog)
    """Takes down what happens and when."""
    vocab_size: int | None = None
    """Token ids of samples must be below it; None if it is not known."""
    engine_context_len: int | None = None
    """Most tokens of prompt and response that the engine takes; None if it does not say."""
    user_hooks: RolloutHooks = field(default_factory=RolloutHooks)
    """Functions of a user's own that see the buffer, samples and groups."""
    services: dict[str, Any] = field(default_factory=dict)
    """What plugins started for the run and share, by a name of theirs; closed with it."""
    ahead: dict[int, tuple[StepRecord, list[Group]]] = field(default_factory=dict)
    """Groups that were generated before their step, by step."""
    _generating: StepRecord = field(default_factory=lambda: StepRecord(step=1))
    _learning: StepRecord = field(default_factory=lambda: StepRecord(step=0))
    _before: tuple[dict[str, Any], Snapshot, Snapshot] | None = None
    """The state of source, buffer and dispatcher before a rollout function of somebody else's began, while it is at work."""

    # Of the other half.

    @abstractmethod
    async def ready_engine(self) -> None:
        """Let the engine generate, with the weights that it had last."""

    @abstractmethod
    async def supplied[T](self, work: Awaitable[T]) -> T:
        """Await generation while the trainer is free: weights go to servers that came back without any."""

    @abstractmethod
    def timed(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Add the time of a block to `perf/<phase>_time` of the step that is trained, seconds."""

    @abstractmethod
    def report(self, phase: str, done: int, total: int) -> None:
        """Tell trackers and plugins how far a phase is."""

    async def generate_groups(self, step: int) -> tuple[StepRecord, list[Group]]:
        """Call the rollout function for the groups of a step; returns them with what was measured meanwhile."""
        timeout = self.settings.rollout.rollout_timeout_s
        if self._generating.step != step:
            self._generating = StepRecord(step=step)
        record = self._generating
        await self.ready_engine()
        if self.rollout_fn is not rollout:
            self._before = self._groups_snapshot()
        with record.timed("rollout", self.events, lane=ROLLOUT):
            what = f"step {step}: rollout (--rollout-timeout-s)"
            work = self.rollout_fn(self, step)
            groups = await within(timeout, what, work, waits_for_others=True, missed=RolloutTimeout)
        if self.rollout_fn is not rollout:  # which checks each sample as it comes
            check_groups(groups, step, vocab_size=self.vocab_size)
        self.user_hooks.filter_samples(groups)
        self.user_hooks.see_all(groups, [group for group, _ in record.dropped], self._take_for_hook)
        self._generating, self._before = StepRecord(step=step + 1), None
        self.dispatcher.arrived()
        return record, groups

    @contextlib.asynccontextmanager
    async def generating(self, step: int) -> AsyncIterator[None]:
        """Generate the groups of a step beside the block, which waits for them at its end; nothing after the last step.

        Raises:
            ConfigError: trainer and engine share devices, or samples would be older than `max_staleness`.
        """
        if problems := [*shared_devices(self.settings), *too_young(self.settings)]:
            raise ConfigError(problems)
        if step > self.num_steps or step in self.ahead:
            yield
            return

        async def generate() -> None:
            self.ahead[step] = await self.generate_groups(step)  # at once: whoever waits may be cancelled

        task = asyncio.create_task(generate())
        try:
            yield
            with self.timed("wait_rollout"):
                await self.supplied(task)
        finally:
            task.cancel()
            await asyncio.wait({task})

    @contextlib.asynccontextmanager
    async def generating_always(self) -> AsyncIterator[None]:
        """Generate beside the block, as far ahead as `max_staleness` allows, and through weight updates.

        Raises:
            ConfigError: trainer and engine share devices, or the rollout function is not the dispatcher's.
        """
        problems = [*shared_devices(self.settings)]
        if self.rollout_fn is not rollout:
            problems.append(other_rollout(self.settings))
        if problems:
            raise ConfigError(problems)
        section = self.settings.rollout
        self.dispatcher.admission = Bounded(
            max_staleness=1 if section.max_staleness is None else section.max_staleness,
            in_completion_order=section.rollout_in_completion_order,
            drops=section.max_staleness_policy == "drop",
        )
        async with self.dispatcher.open():
            yield

    @functools.cached_property
    def dispatcher(self) -> Dispatcher:
        """Owns the groups that were taken and not trained on."""
        return Dispatcher(self, last_step=self.num_steps)

    @functools.cached_property
    def concurrency(self) -> ConcurrencyLimit:
        """What requests to the engine pass, those of evaluations too."""
        return ConcurrencyLimit(self.settings.rollout.rollout_concurrency, self.engine, self.events)

    @property
    def generating_step(self) -> int:
        """The step that the next groups are for."""
        return self._generating.step

    def snapshot(self) -> Snapshot:
        """Return what makes the state of this half, as JSON values, as it is now.

        What is returned raises CheckpointError where a sample holds a value without a JSON form; it names sample and field.
        """
        source, buffer, dispatcher = self._before or self._groups_snapshot()
        open_one = self._generating
        ahead = {step: (record.copy(), groups) for step, (record, groups) in self.ahead.items()}
        again = self._before is not None  # the rollout function begins anew, and drops what it dropped
        begun = StepRecord(step=open_one.step, dropped=[] if again else list(open_one.dropped))
        day: date | None = getattr(self.tokenizer, "day", None)
        return lambda: {
            DAY: None if day is None else day.isoformat(),
            "source": source,
            "buffer": buffer(),
            "dispatcher": dispatcher(),
            "ahead": ahead_to_json(ahead),
            "begun": ahead_to_json({begun.step: (begun, [])}),
        }

    def _groups_snapshot(self) -> tuple[dict[str, Any], Snapshot, Snapshot]:
        """Return the state of all that holds prompts and groups: source, buffer and dispatcher."""
        return self.source.state(), self._buffer_snapshot(), self.dispatcher.snapshot()

    def _buffer_snapshot(self) -> Snapshot:
        """Return what makes the buffer's state as it is now, at once where a buffer of somebody else's can only do that."""
        if (snapshot := getattr(self.buffer, "snapshot", None)) is not None:
            later: Snapshot = snapshot()
            return later
        state = self.buffer.state()
        return lambda: state

    def restore_groups(
        self,
        *,
        dispatcher: Mapping[str, Any],
        ahead: Iterable[Mapping[str, Any]],
        begun: Iterable[Mapping[str, Any]],
    ) -> None:
        """Take on the groups of a checkpoint: in flight, generated ahead, and dropped for a step that is not over."""
        self.dispatcher.restore(dispatcher)
        self.ahead = ahead_from_json(ahead)
        for record, _ in ahead_from_json(begun).values():
            self._generating = record

    # What a rollout function uses.

    async def next_groups(self, step: int) -> list[Group]:
        """Return the groups that the dispatcher has for a step: generated, scored, and kept by the filter."""
        return await self.dispatcher.next(step)

    def take(self, n_groups: int) -> list[Group]:
        """Return groups to generate: those that wait in the buffer first, then new ones."""
        groups = self._take_from_buffer(n_groups)
        if len(groups) == n_groups:
            return groups
        try:
            return groups + self.source.take(n_groups - len(groups))
        except BaseException:
            self.buffer.put(groups)  # a checkpoint may still be taken: it must hold them
            raise

    def _take_from_buffer(self, n_groups: int) -> list[Group]:
        if self.user_hooks.buffer_filter is None:
            return self.buffer.take(n_groups)
        waiting = self.buffer.take(len(self.buffer))
        try:
            groups, rest, dropped = self.user_hooks.chosen_from(waiting, n_groups)
        except BaseException:
            self.buffer.put(waiting)
            raise
        self.buffer.put(rest)
        for group in dropped:
            self.record_drop(group, BUFFER_FILTER)
        return groups

    def _take_for_hook(self, n_groups: int) -> list[Group]:
        """Take prompts for a function that looks at them; they count as dropped, as nothing else has them."""
        groups = self.source.take(n_groups)
        for group in groups:
            self.record_drop(group, TAKEN_BY_HOOK)
        return groups

    def where(self, sample: Sample) -> str:
        """Return how messages name a training sample: with the place of its prompt in the data, if that is known."""
        source, place = self.source, None
        if isinstance(source, PromptSource | MixedSource) and sample.group_index is not None:
            place = source.place_of(sample.group_index)
        return sample.name if place is None else f"{sample.name} ({place})"

    def keep_for_later(self, groups: Sequence[Group], *, given: Sequence[Group]) -> None:
        """Put surplus and aborted groups into the buffer; see `rollout.group.leftovers`."""
        section, step = self.settings.rollout, self._generating.step
        self.buffer.put(leftovers(groups, section, given=given, step=step))

    def put(self, groups: Sequence[Group]) -> None:
        """Put groups into the buffer as they are."""
        self.buffer.put(groups)

    def sampling_params(self, sample: Sample) -> SamplingParams:
        """Return how a training sample is drawn; its seed depends on the run's seed and the sample's index alone."""
        return training_params(sample, self.settings.rollout, self._common_params)

    @functools.cached_property
    def _common_params(self) -> SamplingParams:
        return common_params(self.settings.rollout)

    async def score(self, samples: Sequence[Sample], *, evaluation: bool = False) -> None:
        """Score samples in place, if there is a reward; see `rollout.group.score`."""
        if self.scorer is not None:
            section = self.settings.reward
            await score(samples, self.scorer, section, events=self.events, evaluation=evaluation)

    def add_metrics(self, metrics: Metrics) -> None:
        """Add metrics to those of the step that is generated; raises PluginError for what is no number."""
        self._generating.metrics |= given_metrics(metrics, who="run.add_metrics")

    @property
    def learned(self) -> Mapping[str, float]:
        """Metrics so far of the step that is trained on."""
        return self._learning.metrics

    def add_learned(self, metrics: Metrics) -> None:
        """Add metrics to those of the step that is trained on, as a plugin may at the end of a rollout; raises as `add_metrics`."""
        self._learning.metrics |= given_metrics(metrics, who="run.add_learned")

    def record_drop(self, group: Group, reason: str) -> None:
        """Record a group that the step does not train on, and why."""
        self._generating.dropped.append((group, reason))
