"""`Run`: what a loop drives. A loop is a dozen lines over these methods; see `loops/sync.py`."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from slime_core.rollout.driver import leftovers, most_new_tokens, score
from slime_core.rundir import RunDir
from slime_core.sample import Group, Sample
from slime_core.shared_devices import SharedDevices
from slime_core.weights import sync_weights, wanted_transport

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Run:
    """An assembled run: its parts, its position, and what a loop calls."""

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
    wall_before_s: float = 0.0
    """Seconds that earlier processes spent on this run."""
    _metrics: Metrics = field(default_factory=dict)
    _drops: Counter[str] = field(default_factory=Counter)
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

    # What a loop calls.

    async def begin(self) -> None:
        """Give the engine the trainer's weights, and evaluate if the run is to."""
        self._start_clock(self.done_steps)
        await self.sync_weights(self.done_steps)
        evaluation = self.settings.section(EvalSection)
        if (
            self.done_steps == 0
            and evaluation.eval_interval is not None
            and not evaluation.skip_eval_before_train
        ):
            metrics = await self.evaluate(0)
            self.eval_before = self.eval_after
            for tracker in self.trackers:
                tracker.log(0, metrics)

    async def rollout(self, step: int) -> list[Group]:
        """Generate and score the groups of a step."""
        self._start_clock(step)
        timeout = self.settings.section(RolloutSection).rollout_timeout_s
        await self._ready_engine()
        with self.timed("rollout"):
            groups = await within(timeout, f"step {step}: rollout", self.rollout_fn(self, step))
        self._metrics |= rollout_metrics(groups, reward_key=self._reward_key(), drops=self._drops)
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
            TrainerError: rollout and trainer disagree about log-probs by more than `logprob_diff_limit`.
            CheckpointError: one that was written in the background could not be.
        """
        await self._checkpoints.complete(wait=False)
        section = self.settings.section(TrainSection)
        self.report("train", 0, len(batch))
        await self._turn_to_trainer()
        with self.timed("train"):
            metrics = await within(
                section.train_timeout_s, f"step {batch.step}: training", self.trainer.train(batch)
            )
        self.report("train", len(batch), len(batch))
        self._metrics |= metrics
        diff = metrics.get("train/train_rollout_logprob_abs_diff", 0.0)
        if not diff <= section.logprob_diff_limit:  # nan is no agreement
            raise TrainerError(
                f"step {batch.step}: rollout and trainer log-probs differ by {diff:.4g} nats on average, the limit is "
                f"{section.logprob_diff_limit:g}; the engine's weights or numerics are not the trainer's "
                "(--logprob-diff-limit raises the limit)"
            )
        return metrics

    async def sync_weights(self, version: int) -> None:
        """Bring the trainer's weights to the engine as version `version`, and prove that they arrived.

        An engine that lists no transport takes none, and a trainer that lists none has none.
        """
        if not self.engine.transports or not self.trainer.transports:
            return
        self.report("sync", 0, 1)
        await self._turn_to_engine()
        with self.timed("update_weights"):
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
        last = self.done_steps == self.num_steps
        if _due(self.done_steps, self.settings.section(EvalSection).eval_interval, last=last):
            self._metrics |= await self.evaluate(self.done_steps)
        metrics, self._metrics = self._metrics, {}
        for tracker in self.trackers:
            tracker.log(step, metrics)
        self.registry.hooks.slime_step_end(run=self, step=step, metrics=metrics)
        await self._checkpoints.complete(wait=False)
        if self.settings.section(CheckpointSection).due(self.done_steps, last=last):
            await self.save(self.done_steps)

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
        await self._save_in_time(self._checkpoints.complete(wait=True))

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
        await self._turn_to_trainer()
        with self.timed("save"):
            await self._save_in_time(self._write(step))
        self.saved_at = step
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
        section = self.settings.section(RolloutSection)
        return SamplingParams(
            max_new_tokens=most_new_tokens(sample, section),
            min_new_tokens=section.rollout_min_new_tokens,
            temperature=section.rollout_temperature,
            top_p=section.rollout_top_p,
            top_k=section.rollout_top_k,
            stop=tuple(section.rollout_stop),
            stop_token_ids=tuple(section.rollout_stop_token_ids),
            seed=(section.rollout_seed << 40) + (sample.index or 0),
            skip_special_tokens=section.rollout_skip_special_tokens,
        )

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
                await self._save_in_time(self._checkpoints.complete(wait=True))
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
            "eval_after": self.eval_after,
            "wall_s": self.wall_s,
        }

    @functools.cached_property
    def _checkpoints(self) -> Checkpoints:
        section = self.settings.section(CheckpointSection)
        keep, in_background = section.keep_checkpoints, section.async_save
        return Checkpoints(self.run_dir.checkpoints, self.trainer, keep=keep, in_background=in_background)

    async def _write(self, step: int) -> None:
        save_hf = self.settings.section(CheckpointSection).save_hf
        if save_hf is not None:
            await self.trainer.save_hf(Path(save_hf.format(step=step, rollout_id=step - 1)))
        state = {
            "source": self.source.state(),
            "buffer": self.buffer.state(),
            "eval_before": self.eval_before,
            "eval_after": self.eval_after,
            "evaluated_at": self.evaluated_at,
            "wall_s": self.wall_s,
        }
        await self._checkpoints.save(step, state)

    async def _save_in_time(self, work: Awaitable[None]) -> None:
        timeout = self.settings.section(TrainSection).train_timeout_s
        await within(timeout, f"the checkpoint after step {self.done_steps} (--train-timeout-s)", work)

    @functools.cached_property
    def devices(self) -> SharedDevices:
        """Whose turn it is, where trainer and engine share devices."""
        return SharedDevices(self.trainer, self.engine, self.settings.section(ClusterSection))

    async def _turn_to_trainer(self) -> None:
        if self.devices.are_shared:
            with self.timed("offload"):
                await self.devices.for_trainer()

    async def _turn_to_engine(self) -> bool:
        """Let the engine work; returns whether it has its weights."""
        if not self.devices.are_shared:
            return True
        with self.timed("offload"):
            return await self.devices.for_engine()

    async def _ready_engine(self) -> None:
        """Let the engine generate, with the weights that it had last."""
        if not await self._turn_to_engine():
            await self.sync_weights(self._version)

    def _start_clock(self, step: int) -> None:
        self._step, self._step_began = step, time.perf_counter()

    def _reward_key(self) -> str | None:
        return self.settings.section(RewardSection).reward_key


def _due(step: int, interval: int | None, *, last: bool) -> bool:
    """Say whether something that happens every `interval` steps, and at the end, is due after `step` steps."""
    return interval is not None and (last or step % interval == 0)
