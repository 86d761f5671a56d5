"""`Run`: the steps of a run as methods that a loop calls; see `loops/sync.py`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import RolloutTimeout
from slime_core.protocols import DataSource, Metrics, Trainer
from slime_core.rollout.given_metrics import given_metrics
from slime_core.run.colocate import SharedDevices
from slime_core.run.evaluation import evaluate, evaluate_groups
from slime_core.run.generating import GeneratingHalf, Snapshot
from slime_core.run.log_prob_gate import LogProbGate
from slime_core.run.metrics import idle_shares, request_metrics, rollout_metrics
from slime_core.run.progress_check import Learnt
from slime_core.run.staleness import check_staleness, staleness_metrics
from slime_core.run.step_record import StepRecord
from slime_core.run.supply import supplied
from slime_core.run.tracking import detach, more_metrics
from slime_core.rundir.checkpoint import Checkpoints
from slime_core.rundir.events import LOOP, RANK
from slime_core.rundir.rundir import RunDir
from slime_core.runtime.clock import now
from slime_core.runtime.closing import close_all, logged
from slime_core.runtime.deadline import within
from slime_core.runtime.garbage import collect_as_usual
from slime_core.runtime.stop import Stop
from slime_core.samples import Group, TrainBatch
from slime_core.weights.sync import sync_weights


@dataclass(kw_only=True)
class Run(GeneratingHalf):
    """An assembled run: its parts, its position, and what a loop calls. This half learns, the other one generates."""

    run_dir: RunDir
    eval_source: DataSource | None
    eval_start: Mapping[str, Any]
    """Position of the first held-out prompt."""
    trainer: Trainer
    trackers: Sequence[object]
    """Answer hooks from the start of the run to its end; see `slime_core.hookspecs`."""
    make_batch: Callable[[int, Sequence[Group]], TrainBatch]
    """Finished groups to a batch, the plugins that it needs bound."""
    transport: str | None = None
    """How weights go to the engine; None for its best one that the trainer has too."""
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
    """Whether this process has begun to write to the folder: the checkpoint that it resumes from was accepted."""
    wall_before_s: float = 0.0
    """Seconds that earlier processes spent on this run."""
    stop: Stop = field(default_factory=Stop)
    """Asks the run to end."""
    whole: Snapshot | None = None
    """State of everything but the trainer after the last complete step, if no checkpoint holds it; see `snapshot`."""
    trained_step: int = 0
    """The last step that was trained."""
    unlogged: Metrics | None = None
    """Metrics of that step until it is evaluated and logged."""
    is_training: bool = False
    """Whether a step's optimizer steps are running, or failed."""
    _learnt: Learnt = field(default_factory=Learnt)
    _version: int = 0
    _began: float = field(default_factory=now)
    _step_began: float = 0.0

    @functools.cached_property
    def log_prob_gate(self) -> LogProbGate:
        """Compares the log-probs of engine and trainer."""
        section = self.settings.train
        return LogProbGate(
            section.logprob_diff_limit, expects_jumps=section.update_weights_in_flight == "keep"
        )

    @property
    def steps(self) -> range:
        """The steps that this process is to run; a run's first is 1."""
        return range(self.start_step, self.num_steps + 1)

    @property
    def wall_s(self) -> float:
        """Seconds spent on this run so far, earlier processes included."""
        return self.wall_before_s + now() - self._began

    # What a loop calls.

    async def begin(self) -> None:
        """Send the trainer's weights to the engine, and evaluate if `--eval-interval` is set and the run is new."""
        self._learning = StepRecord(step=self.done_steps)
        if self._generating.step != self.start_step:
            self._generating = StepRecord(step=self.start_step)
        await self.send_weights(self.done_steps)
        if self.unlogged is not None:
            self._learning.metrics = self.unlogged
            await self._log_step(self.done_steps)
            await self.save(self.done_steps)
        evaluation = self.settings.eval
        wanted = evaluation.eval_interval is not None and not evaluation.skip_eval_before_train
        if self.done_steps == 0 and wanted:
            metrics = await self.evaluate(0)
            self.eval_before = self.eval_after
            self.registry.hooks.slime_step_end(run=self, step=0, metrics=metrics)
        self._keep_state()
        self._begin_step()

    async def rollout(self, step: int) -> list[Group]:
        """Return the groups of a step, generated and scored, and record them."""
        if step in self.ahead:
            record, groups = self.ahead.pop(step)
        else:
            record, groups = await self.supplied(self.generate_groups(step))
        # A step's checkpoint is written when its row is: the time of that goes into the next one.
        record.metrics |= {n: s for n, s in self._learning.metrics.items() if n == "perf/save_time"}
        self._learning = record
        key, metrics = self.settings.reward.reward_key, record.metrics
        metrics |= rollout_metrics(groups, reward_key=key, drops=record.drops)
        rollout_s = 0.0 if self.dispatcher.admission.carries else metrics["perf/rollout_time"]
        metrics |= request_metrics(groups, rollout_s=rollout_s)
        check_staleness(groups, step=step, bound=self.dispatcher.admission.max_staleness)
        metrics |= staleness_metrics(groups, step=step) | self.dispatcher.depth()
        metrics |= self.concurrency.take_metrics()
        takes_over, added = self.user_hooks.logs_rollout(step, groups, metrics, metrics["perf/rollout_time"])
        if takes_over:
            for name in [name for name in metrics if name.startswith("rollout/")]:
                del metrics[name]
        metrics |= added
        with record.timed("dump", self.events):
            self.run_dir.write_samples(step, groups)
            self.run_dir.write_dropped(step, record.dropped)
        record.dropped.clear()
        self.registry.hooks.slime_rollout_end(run=self, step=step, groups=groups)
        return groups

    def batch(self, step: int, groups: Sequence[Group]) -> TrainBatch:
        """Lay the groups out for the trainer."""
        with self.timed("batch"):
            return self.make_batch(step, groups)

    async def train(self, batch: TrainBatch) -> Metrics:
        """Run the batch's optimizer steps.

        Raises:
            TrainerError: log-probs of rollout and trainer differ too much, on average or of a sample (see
                `run.log_prob_gate`), or nothing was learnt.
            CheckpointError: one that was written in the background could not be.
            PluginError: one of the trainer's metrics is no number.
        """
        await self.checkpoints.complete(wait=False)
        section = self.settings.train
        self.report("train", 0, len(batch))
        await self.devices.for_trainer()
        with self._held("train"):
            self.whole, self.is_training = None, True
            begin, training = now(), self.trainer.train(batch)
            answer = await within(section.train_timeout_s, f"step {batch.step}: training", training)
            await self._tell_phases(batch.step, begin)
        self.report("train", len(batch), len(batch))
        metrics = given_metrics(answer, who=f"step {batch.step}: the trainer")
        self._learning.metrics |= metrics
        self._learnt.add(batch, metrics, is_last=batch.step == self.num_steps)
        self.log_prob_gate.check(metrics, step=batch.step)
        self.unlogged, self.trained_step, self.is_training = self._learning.metrics, batch.step, False
        return metrics

    async def _tell_phases(self, step: int, begin: float) -> None:
        """Tell what each rank did in the training that began at `begin`, if the trainer says it."""
        if self.events.is_on and self.trainer.capabilities.phases:
            asked = self.trainer.phases()
            for one in await within(self.settings.train.train_timeout_s, f"step {step}: times", asked):
                lane, begun = f"{RANK}{one.rank}", begin + one.begin
                self.events.span(one.name, lane=lane, begin=begun, seconds=one.seconds, step=step)

    async def sync_weights(self, version: int) -> None:
        """Bring the trainer's weights to the engine after step `version`, and prove that they arrived.

        With `update_weights_interval` that happens every so many steps, after the last one, and before an evaluation. An
        engine that lists no transport takes none, and a trainer that lists none has none.
        """
        last = version == self.num_steps
        evaluates = _due(version, self.settings.eval.eval_interval, last=last)
        if evaluates or _due(version, self.settings.train.update_weights_interval, last=last):
            await self.send_weights(version)

    async def send_weights(self, version: int, *, midway: bool = False) -> None:
        """Bring the trainer's weights to the engine as a version, due or not; `midway`: while it generates."""
        if not self.engine.capabilities.transports or not self.trainer.capabilities.transports:
            self.dispatcher.weights_arrived(version)
            return
        self.report("sync", 0, 1)
        await self.devices.for_update()
        section = self.settings.train
        ends = section.update_weights_in_flight == "continue"
        with self.timed("update_weights"):
            async with self.dispatcher.interrupted() if ends else contextlib.nullcontext():
                with self.stop.held():
                    await sync_weights(
                        self.trainer,
                        self.engine,
                        version=str(version),
                        timeout_s=section.weight_sync_timeout_s,
                        transport=self.transport,
                    )
        self.devices.weights_arrived()
        if midway:  # the engine generates
            await self.devices.for_engine()
        self._version = version
        self.dispatcher.weights_arrived(version)
        self.report("sync", 1, 1)

    async def end_step(self, step: int) -> None:
        """Evaluate and save when it is time, and tell the trackers the step's metrics."""
        step_s = now() - self._step_began
        self.events.span("step", lane=LOOP, begin=self._step_began, seconds=step_s, step=step)
        shares = idle_shares(self._learning.metrics, step_s, engine_s=self.dispatcher.busy_s())
        self._learning.metrics |= {"perf/step_time": step_s} | shares
        self.done_steps = step
        await self._log_step(step)
        self._keep_state()  # before the save, too: a run that is asked to end here does not begin it
        await self.checkpoints.complete(wait=False)
        if self.settings.checkpoint.due(self.done_steps, last=self.done_steps == self.num_steps):
            await self.save(self.done_steps)
        self.events.hand_over()
        self._begin_step()

    def _begin_step(self) -> None:
        """Count the next step's time from here, and what the engine is busy in it."""
        self._step_began, _ = now(), self.dispatcher.busy_s()

    async def finish(self) -> None:
        """Evaluate and save where a loop stopped early; nothing is left to do after the last step."""
        evaluates = _due(self.done_steps, self.settings.eval.eval_interval, last=True)
        if evaluates and self.evaluated_at != self.done_steps:
            if self.trained_step > self._version:  # the loop stopped between two updates
                await self.send_weights(self.trained_step)
            metrics = await self.evaluate(self.done_steps)
            self.registry.hooks.slime_step_end(run=self, step=self.done_steps, metrics=metrics)
        due = self.settings.checkpoint.due(self.done_steps, last=True)
        if due and self.saved_at != self.done_steps:
            await self.save(self.done_steps)
        await self.checkpoints.complete(wait=True)
        self.run_dir.flush()

    async def evaluate(self, step: int) -> Metrics:
        """Evaluate on the held-out prompts after `step`, 0 before the first; returns `eval/*` metrics, remembers the accuracy."""
        has_prompts = self.eval_source is not None or self.eval_fn not in (None, evaluate)
        if self.settings.eval.eval_interval is None or not has_prompts:
            return {}
        await self.ready_engine()
        self.events.hand_over()
        begin = now()
        write = functools.partial(self.run_dir.write_samples, step, evaluation=True)
        start, function = self.eval_start, self.eval_fn
        timeout = self.settings.rollout.rollout_timeout_s
        what = f"evaluation after step {step} (--rollout-timeout-s)"
        work = evaluate_groups(self, self.eval_source, step=step, start=start, write=write, function=function)
        metrics, accuracy = await self.supplied(within(timeout, what, work, missed=RolloutTimeout))
        self.eval_after, self.evaluated_at = accuracy, step
        seconds = now() - begin
        self.events.span("eval", lane=LOOP, begin=begin, seconds=seconds, step=step)
        return metrics | {"perf/eval_time": seconds}

    async def save(self, step: int) -> None:
        """Write the folder of `save_hf`, then a checkpoint from which the run resumes exactly after `step`.

        With `async_save` it is written after the call returns. `perf/save_time` of the next step is the time that the run waited.
        """
        self.report("save", 0, 1)
        await self.devices.for_trainer()
        with self._held("save"):
            self.run_dir.flush()
            await self.checkpoints.save(step, self.snapshot()())
            self.saved_at, self.whole = step, None
        self.report("save", 1, 1)

    def snapshot(self) -> Snapshot:
        """Return what makes the state of everything but the trainer, as JSON values, of the run as it is now."""
        generating = super().snapshot()
        own = {
            "eval_before": self.eval_before,
            "eval_after": self.eval_after,
            "evaluated_at": self.evaluated_at,
            "wall_s": self.wall_s,
            "largest_logprob_diff": self.log_prob_gate.largest,
        }
        return lambda: generating() | own

    def report(self, phase: str, done: int, total: int) -> None:
        """Tell trackers and plugins how far a phase is."""
        step = self._generating.step if phase == "rollout" else self._learning.step
        self.registry.hooks.slime_progress(run=self, step=step, phase=phase, done=done, total=total)

    def timed(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Add the time of a block to `perf/<phase>_time` of the step that is trained, seconds."""
        return self._learning.timed(phase, self.events)

    @contextlib.contextmanager
    def _held(self, phase: str) -> Iterator[None]:
        """Hold a request to stop back until the block is over, and time it."""
        with self.stop.held(), self.timed(phase):
            yield

    async def close(self) -> None:
        """Stop generator, engine, trainer and reward workers, and unlock the run folder. May be called twice.

        What fails is logged, and keeps nothing else open. A checkpoint that a run which fails is still writing is completed.
        """
        try:
            with logged("samples of the last step are not recorded"):
                self.run_dir.flush()
            with logged("the checkpoint that was being written is lost"):
                await self.checkpoints.complete(wait=True)
            with logged("the last events are not recorded"):
                self.events.close()
        finally:
            detach(self.registry, self.trackers)
            generator = self.generate if hasattr(self.generate, "close") else None  # one that is an object
            own = self.services.values()
            parts = (generator, *own, self.engine, self.trainer, self.scorer, self.user_hooks)
            await close_all([part for part in parts if part is not None])
            self.run_dir.release()
            collect_as_usual()

    def summary(self, status: str) -> dict[str, Any]:
        """Return what `summary.json` says."""
        return {
            "status": status,
            "run_name": self.settings.run.run_name,
            "steps": self.done_steps,
            "eval_before": self.eval_before,
            "eval_after": None if self.evaluated_at == 0 else self.eval_after,
            "wall_s": self.wall_s,
        }

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """Writes the run's checkpoints."""
        section = self.settings.checkpoint
        return Checkpoints(
            self.run_dir.checkpoints,
            self.trainer,
            keep=section.keep_checkpoints,
            in_background=section.async_save,
            save_hf=section.save_hf,
            timeout_s=self.settings.train.train_timeout_s,
            held=self.stop.held,
        )

    async def _log_step(self, step: int) -> None:
        """Evaluate when it is time, and tell trackers and plugins the step's metrics."""
        self.unlogged, self.trained_step = self._learning.metrics, step
        last = self.done_steps == self.num_steps
        if _due(self.done_steps, self.settings.eval.eval_interval, last=last):
            self._learning.metrics |= await self.evaluate(self.done_steps)
        metrics, self._learning.metrics = dict(self._learning.metrics), {}
        metrics |= more_metrics(self, step, metrics)
        self.registry.hooks.slime_step_end(run=self, step=step, metrics=metrics)
        self.unlogged = None  # not before: where one of them raises, it is saved to be logged again

    def _keep_state(self) -> None:
        """Keep the state after a complete step, for a checkpoint if the run is interrupted before the next one is due."""
        due = self.settings.checkpoint.due(self.done_steps, last=True)
        self.whole = self.snapshot() if due and self.done_steps not in (0, self.saved_at) else None

    @functools.cached_property
    def devices(self) -> SharedDevices:
        """Offloads trainer and engine in turn if they share devices."""
        section, timeout = self.settings.cluster, self.settings.train.weight_sync_timeout_s
        return SharedDevices(self.trainer, self.engine, section, timeout_s=timeout, during=self._held)

    async def supplied[T](self, work: Awaitable[T]) -> T:
        """Await generation while the trainer is free: weights go to servers that came back without any."""
        version = max(self._version, self.trained_step)
        send = functools.partial(self.send_weights, version, midway=True)
        return await supplied(work, self.engine, version=version, send=send)

    async def ready_engine(self) -> None:
        """Let the engine generate, with the weights that it had last; with the newest where it has none any more."""
        if not self.devices.engine_has_weights:
            await self.send_weights(max(self._version, self.trained_step))
        await self.devices.for_engine()


def _due(step: int, interval: int | None, *, last: bool) -> bool:
    """Say whether something that happens every `interval` steps, and at the end, is due after `step` steps."""
    return interval is not None and (last or step % interval == 0)
