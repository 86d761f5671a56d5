"""`Run`: what a loop drives. A loop is a dozen lines over these methods; see `loops/sync.py`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.batch import TrainBatch
from slime_core.checkpoint import Checkpoints
from slime_core.config.derive import BatchSizes
from slime_core.config.sections import (
    CheckpointSection,
    ClusterSection,
    EvalSection,
    RewardSection,
    RolloutSection,
    RunSection,
    TrainSection,
)
from slime_core.config.settings import Settings
from slime_core.deadline import within
from slime_core.ending import close_all, logged
from slime_core.errors import TrainerError
from slime_core.evaluate import evaluate_groups
from slime_core.learnt import Learnt
from slime_core.metrics import request_metrics, rollout_metrics
from slime_core.plugins.registry import Registry
from slime_core.protocols import (
    Buffer,
    DataSource,
    GenerateFn,
    Metrics,
    RolloutEngine,
    RolloutFn,
    SamplingParams,
    Tokenizer,
    Tracker,
    Trainer,
)
from slime_core.rewards.scorer import Scorer
from slime_core.rollout.driver import leftovers, rollout, score, training_params
from slime_core.rollout.execution import check_groups
from slime_core.rundir import RunDir
from slime_core.sample import Group, Sample
from slime_core.saving import in_time, state_of, write
from slime_core.shared_devices import SharedDevices
from slime_core.stop import Stop
from slime_core.weights import sync_weights, wanted_transport


@dataclass(kw_only=True)
class Run:
    """An assembled run: its parts, its position, and the moves that a loop makes."""

    settings: Settings
    registry: Registry
    run_dir: RunDir
    tokenizer: Tokenizer
    source: DataSource
    eval_source: DataSource | None
    eval_start: Mapping[str, Any]
    """Position of the first held-out prompt."""
    buffer: Buffer
    engine: RolloutEngine
    trainer: Trainer
    generate: GenerateFn
    scorer: Scorer | None
    trackers: Sequence[Tracker]
    sizes: BatchSizes
    num_steps: int
    rollout_fn: RolloutFn
    """The whole rollout of a step."""
    make_batch: Callable[[int, Sequence[Group]], TrainBatch]
    """Finished groups to a batch, the plugins that it needs bound."""
    drop_reason: Callable[[Group], str | None]
    """The dynamic sampling filter, its options bound."""
    vocab_size: int | None = None
    """Ids that samples may have are below it; None where nobody knows."""
    start_step: int = 1
    """First step of this process; later than 1 when resumed."""
    done_steps: int = 0
    """The last step that is done, in this process or an earlier one; 0 before the first."""
    eval_before: float | None = None
    """Accuracy before the first step."""
    eval_after: float | None = None
    """Newest accuracy."""
    evaluated_at: int | None = None
    """The step after which it was evaluated last; 0 is before the first."""
    saved_at: int | None = None
    """The step after which its newest checkpoint was taken."""
    is_recorded: bool = False
    """Whether its folder tells of this process: what it goes on from was accepted."""
    wall_before_s: float = 0.0
    """Seconds that earlier processes spent on this run."""
    stop: Stop = field(default_factory=Stop)
    """Asks the run to end."""
    whole: dict[str, Any] | None = None
    """State of all but the trainer after the last whole step, where no checkpoint holds it; see `saving.state_of`."""
    trained_step: int = 0
    """The last step that was trained."""
    unlogged: Metrics | None = None
    """Metrics of that step, while it is still to be evaluated and told to the trackers."""
    is_training: bool = False
    """Whether a step's optimizer steps are under way, or failed."""
    _metrics: Metrics = field(default_factory=dict)
    _drops: Counter[str] = field(default_factory=Counter)
    _learnt: Learnt = field(default_factory=Learnt)
    _step: int = 0
    _version: int = 0
    _began: float = field(default_factory=time.perf_counter)
    _step_began: float = 0.0

    @property
    def steps(self) -> range:
        """The steps that this process is to run; a run's first is 1."""
        return range(self.start_step, self.num_steps + 1)

    @property
    def seed(self) -> int:
        """Seed of prompts and sampling."""
        return self.settings.section(RolloutSection).rollout_seed

    @property
    def max_waves(self) -> int:
        """Waves of sampling after which a step gives up."""
        return self.settings.section(RolloutSection).dynamic_sampling_max_waves

    @property
    def in_completion_order(self) -> bool:
        """Whether a step keeps the groups that finish first."""
        return self.settings.section(RolloutSection).rollout_in_completion_order

    @property
    def wall_s(self) -> float:
        """Seconds spent on this run so far, earlier processes included."""
        return self.wall_before_s + time.perf_counter() - self._began

    # The moves of a loop.

    async def begin(self) -> None:
        """Give the engine the trainer's weights, and evaluate if the run is to."""
        self._step, self._step_began = self.done_steps, time.perf_counter()
        await self.sync_weights(self.done_steps)
        if self.unlogged is not None:
            self._metrics = self.unlogged
            await self._log_step(self.done_steps)
            await self.save(self.done_steps)
        evaluation = self.settings.section(EvalSection)
        wanted = evaluation.eval_interval is not None and not evaluation.skip_eval_before_train
        if self.done_steps == 0 and wanted:
            metrics = await self.evaluate(0)
            self.eval_before = self.eval_after
            for tracker in self.trackers:
                tracker.log(0, metrics)
        self._keep_state()

    async def rollout(self, step: int) -> list[Group]:
        """Generate and score the groups of a step."""
        self._step, self._step_began = step, time.perf_counter()
        timeout = self.settings.section(RolloutSection).rollout_timeout_s
        await self._ready_engine()
        with self.timed("rollout"):
            groups = await within(timeout, f"step {step}: rollout", self.rollout_fn(self, step))
        if self.rollout_fn is not rollout:  # which checks each sample as it comes
            check_groups(groups, step, vocab_size=self.vocab_size)
        key, drops = self.settings.section(RewardSection).reward_key, self._drops
        self._metrics |= rollout_metrics(groups, reward_key=key, drops=drops)
        self._metrics |= request_metrics(groups, rollout_s=self._metrics["perf/rollout_time"])
        self._drops.clear()
        with self.timed("dump"):
            self.run_dir.write_samples(step, groups)
        self.registry.hooks.slime_rollout_end(run=self, step=step, groups=groups)
        return groups

    def batch(self, step: int, groups: Sequence[Group]) -> TrainBatch:
        """Lay the groups out for the trainer."""
        with self.timed("batch"):
            return self.make_batch(step, groups)

    async def train(self, batch: TrainBatch) -> Metrics:
        """Run the batch's optimizer steps.

        Raises:
            TrainerError: log-probs of rollout and trainer differ by more than `logprob_diff_limit`, or nothing was learnt.
            CheckpointError: one that was written in the background could not be.
        """
        await self.checkpoints.complete(wait=False)
        section = self.settings.section(TrainSection)
        self.report("train", 0, len(batch))
        await self.turn_to_trainer()
        self.whole, self.is_training = None, True
        with self.stop.held(), self.timed("train"):
            training = self.trainer.train(batch)
            metrics = await within(section.train_timeout_s, f"step {batch.step}: training", training)
        self.report("train", len(batch), len(batch))
        self._metrics |= metrics
        self._learnt.add(batch, metrics, is_last=batch.step == self.num_steps)
        diff = metrics.get("train/train_rollout_logprob_abs_diff", 0.0)
        if not diff <= section.logprob_diff_limit:  # nan is no agreement
            raise TrainerError(
                f"step {batch.step}: rollout and trainer log-probs differ by {diff:.4g} nats on average, the limit is "
                f"{section.logprob_diff_limit:g}; the engine's weights or numerics are not the trainer's "
                "(--logprob-diff-limit raises the limit)"
            )
        self.unlogged, self.trained_step, self.is_training = self._metrics, batch.step, False
        return metrics

    async def sync_weights(self, version: int) -> None:
        """Bring the trainer's weights to the engine as version `version`, and prove that they arrived.

        An engine that lists no transport takes none, and a trainer that lists none has none.
        """
        if not self.engine.transports or not self.trainer.transports:
            return
        self.report("sync", 0, 1)
        await self._turn_to_engine()
        with self.stop.held(), self.timed("update_weights"):
            section = self.settings.section(TrainSection)
            await sync_weights(
                self.trainer,
                self.engine,
                version=str(version),
                timeout_s=section.weight_sync_timeout_s,
                transport=wanted_transport(section),
            )
        self.devices.weights_arrived()
        self._version = version
        self.report("sync", 1, 1)

    async def end_step(self, step: int) -> None:
        """Evaluate and save when it is time, and tell the trackers the step's metrics."""
        self._metrics["perf/step_time"] = time.perf_counter() - self._step_began
        self.done_steps = step
        await self._log_step(step)
        await self.checkpoints.complete(wait=False)
        last = self.done_steps == self.num_steps
        if self.settings.section(CheckpointSection).due(self.done_steps, last=last):
            await self.save(self.done_steps)
        else:
            self._keep_state()

    async def finish(self) -> None:
        """Evaluate and save where a loop stopped early; nothing is left to do after the last step."""
        if _due(self.done_steps, self.settings.section(EvalSection).eval_interval, last=True) and (
            self.evaluated_at != self.done_steps
        ):
            metrics = await self.evaluate(self.done_steps)
            for tracker in self.trackers:
                tracker.log(self.done_steps, metrics)
        due = self.settings.section(CheckpointSection).due(self.done_steps, last=True)
        if due and self.saved_at != self.done_steps:
            await self.save(self.done_steps)
        await in_time(self, self.checkpoints.complete(wait=True))

    async def evaluate(self, step: int) -> Metrics:
        """Evaluate on the held-out prompts after `step`, 0 before the first; returns `eval/*` metrics, remembers the accuracy."""
        if self.eval_source is None:
            return {}
        await self._ready_engine()
        begin = time.perf_counter()
        section = self.settings.section(EvalSection)
        metrics, accuracy = await within(
            self.settings.section(RolloutSection).rollout_timeout_s,
            f"evaluation after step {step} (--rollout-timeout-s)",
            evaluate_groups(self, self.eval_source, section, step=step),
        )
        self.eval_after, self.evaluated_at = accuracy, step
        return metrics | {"perf/eval_time": time.perf_counter() - begin}

    async def save(self, step: int) -> None:
        """Write a checkpoint from which the run goes on after `step` exactly, and before it the folder of `save_hf`.

        With `async_save` its writing goes on after the call. `perf/save_time` of the next step is what the run waited.
        """
        self.report("save", 0, 1)
        await self.turn_to_trainer()
        with self.stop.held(), self.timed("save"):
            await write(self, step, state_of(self))
            self.saved_at, self.whole = step, None
        self.report("save", 1, 1)

    # What a rollout function uses.

    def take(self, n_groups: int) -> list[Group]:
        """Return groups to generate: those that wait in the buffer first, then new ones."""
        groups = self.buffer.take(n_groups)
        return groups + self.source.take(n_groups - len(groups)) if len(groups) < n_groups else groups

    def keep_for_later(self, groups: Sequence[Group]) -> None:
        """Put surplus and aborted groups into the buffer; see `rollout.driver.leftovers`."""
        self.buffer.put(leftovers(groups, self.settings.section(RolloutSection)))

    def sampling_params(self, sample: Sample) -> SamplingParams:
        """Return how a training sample is drawn; its seed depends on the run's seed and the sample's index alone."""
        return training_params(sample, self.settings.section(RolloutSection))

    async def score(self, samples: Sequence[Sample]) -> None:
        """Score samples in place, if there is a reward; see `rollout.driver.score`."""
        if self.scorer is not None:
            await score(samples, self.scorer, self.settings.section(RewardSection))

    def record_drops(self, drops: Counter[str]) -> None:
        """Count groups that the step dropped, by reason."""
        self._drops.update(drops)

    def report(self, phase: str, done: int, total: int) -> None:
        """Tell the trackers how far a phase is."""
        for tracker in self.trackers:
            tracker.phase(self._step, phase, done, total)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to the step's `perf/<phase>_time`, seconds."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            name = f"perf/{phase}_time"
            self._metrics[name] = self._metrics.get(name, 0.0) + time.perf_counter() - begin

    async def close(self) -> None:
        """Stop engine, trainer and reward workers, and let go of the folder; may be called twice.

        What fails is logged, and keeps nothing else open. A checkpoint that a run which fails is still writing is completed.
        """
        try:
            with logged("the checkpoint that was being written is lost"):
                await in_time(self, self.checkpoints.complete(wait=True))
        finally:
            parts = (self.engine, self.trainer, self.scorer)
            await close_all([part for part in parts if part is not None])
            self.run_dir.release()

    def summary(self, status: str) -> dict[str, Any]:
        """Return what `summary.json` says."""
        return {
            "status": status,
            "run_name": self.settings.section(RunSection).run_name,
            "steps": self.done_steps,
            "eval_before": self.eval_before,
            "eval_after": None if self.evaluated_at == 0 else self.eval_after,
            "wall_s": self.wall_s,
        }

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """Writes the run's checkpoints."""
        section = self.settings.section(CheckpointSection)
        keep, in_background = section.keep_checkpoints, section.async_save
        return Checkpoints(self.run_dir.checkpoints, self.trainer, keep=keep, in_background=in_background)

    async def _log_step(self, step: int) -> None:
        """Evaluate when it is time, and tell the trackers and plugins the step's metrics."""
        self.unlogged, self.trained_step = self._metrics, step
        last = self.done_steps == self.num_steps
        if _due(self.done_steps, self.settings.section(EvalSection).eval_interval, last=last):
            self._metrics |= await self.evaluate(self.done_steps)
        metrics, self._metrics, self.unlogged = self._metrics, {}, None
        for tracker in self.trackers:
            tracker.log(step, metrics)
        self.registry.hooks.slime_step_end(run=self, step=step, metrics=metrics)

    def _keep_state(self) -> None:
        """Remember the state after a whole step, in case that the run is interrupted before the next checkpoint."""
        due = self.settings.section(CheckpointSection).due(self.done_steps, last=True)
        self.whole = state_of(self) if due and self.done_steps not in (0, self.saved_at) else None

    @functools.cached_property
    def devices(self) -> SharedDevices:
        """Whose turn it is, where trainer and engine share devices."""
        return SharedDevices(self.trainer, self.engine, self.settings.section(ClusterSection))

    async def turn_to_trainer(self) -> None:
        """Let the trainer work, where it shares devices with the engine."""
        if self.devices.are_shared:
            await self._take_turns(self.devices.for_trainer())

    async def _turn_to_engine(self) -> bool:
        """Let the engine work; returns whether it has its weights."""
        return not self.devices.are_shared or await self._take_turns(self.devices.for_engine())

    async def _take_turns[T](self, turn: Awaitable[T]) -> T:
        timeout = self.settings.section(TrainSection).weight_sync_timeout_s
        with self.stop.held(), self.timed("offload"):
            return await within(timeout, "offloading (--weight-sync-timeout-s)", turn)

    async def _ready_engine(self) -> None:
        """Let the engine generate, with the weights that it had last."""
        if not await self._turn_to_engine():
            await self.sync_weights(self._version)


def _due(step: int, interval: int | None, *, last: bool) -> bool:
    """Say whether something that happens every `interval` steps, and at the end, is due after `step` steps."""
    return interval is not None and (last or step % interval == 0)
