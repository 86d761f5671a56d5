"""Simulating a run: the loop, the dispatcher and all that `Run` does, over parts that take virtual time."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from slime_core.config.derive import BatchSizes, batch_sizes
from slime_core.config.settings import Settings
from slime_core.data.buffers import FifoBuffer
from slime_core.data.make_batch import make_batch
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.registry import Registry
from slime_core.protocols import DataSource, Metrics, RolloutEngine, Trainer
from slime_core.rewards.scorer import Scorer
from slime_core.rewards.transforms import raw
from slime_core.rollout.concurrency import ConcurrencyLimit
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.group import failure_of
from slime_core.rollout.rollouts.default import rollout
from slime_core.run.run import Run
from slime_core.run.tracking import attach
from slime_core.rundir.rundir import RunDir
from slime_core.runtime.virtual_time import run_in_virtual_time
from slime_core.samples import Group
from slime_core.testing.tabular import per_token

from slime_simulator.costs.costs import Costs
from slime_simulator.costs.traces import Trace
from slime_simulator.parts.engine import SimulatedEngine
from slime_simulator.parts.prompts import NumberTokenizer, SimulatedPrompts
from slime_simulator.parts.rewards import SimulatedRewards
from slime_simulator.parts.trainer import SimulatedTrainer


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the parts run on."""

    replicas: int
    """Replicas of the engine."""
    trainer_gpus: int
    """GPUs that train; with `colocate` they are those of the engine."""
    gpus_per_replica: int = 1
    """GPUs of a replica."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What a simulation found. Seconds are virtual."""

    loop: str
    steps: int
    wall_s: float
    """Seconds from the begin of the first step to the end of the last, with the evaluations and checkpoints between them."""
    step_s: float
    """Seconds of the median step."""
    samples: int
    """That were trained on."""
    tokens: int
    """Of their prompts and responses."""
    staleness_mean: float
    """Steps between the oldest weights of a group and those that trained on it."""
    staleness_max: int
    engine_idle: float
    """Share of the time in which a replica has nothing to decode: the mean over the replicas."""
    trainer_idle: float
    """Share of the time in which the trainer does not train."""
    update_share: float
    """Share of the time in which weights are sent, and the trainer waits."""
    running: float
    """Mean number of requests that a replica decodes together, while it has any."""
    step_times: tuple[float, ...] = field(repr=False)
    """Seconds of each step."""

    @property
    def samples_per_s(self) -> float:
        """Samples trained on in a second."""
        return self.samples / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and responses trained on in a second."""
        return self.tokens / self.wall_s


class StepTimes:
    """A tracker that keeps the times and ages of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.update_s = 0.0
        self.ages: list[int] = []

    @hookimpl
    def slime_rollout_end(self, run: Any, step: int, groups: Sequence[Group]) -> None:
        """Keep the ages of a step's groups."""
        self.ages += [step - 1 - int(group[0].weight_versions[0]) for group in groups]

    @hookimpl
    def slime_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a step's metrics; of the evaluation before the first there are none."""
        if not step:
            return
        self.seconds.append(metrics["perf/step_time"])
        self.update_s += metrics.get("perf/update_weights_time", 0.0)


@dataclass(kw_only=True)
class SimulatedRun(Run):
    """A run whose evaluations and checkpoints take time, and do nothing; meanwhile the engine goes on as it is."""

    eval_s: float = 0.0
    save_s: float = 0.0
    paused_s: float = 0.0
    """Seconds of evaluations and checkpoints after steps but the last."""

    @functools.cached_property
    def concurrency(self) -> ConcurrencyLimit:
        """The engine's own limit."""
        return cast(SimulatedEngine, self.engine).limit

    async def evaluate(self, step: int) -> Metrics:
        """Take the time of an evaluation."""
        await self._pause(self.eval_s, step)
        return {}

    async def save(self, step: int) -> None:
        """Take the time of a checkpoint."""
        await self._pause(self.save_s, step)
        self.saved_at, self.whole = step, None

    async def _pause(self, seconds: float, step: int) -> None:
        await asyncio.sleep(seconds)
        if 0 < step < self.num_steps:
            self.paused_s += seconds


def make_run(
    settings: Settings,
    registry: Registry,
    *,
    engine: RolloutEngine,
    trainer: Trainer,
    source: DataSource,
    sizes: BatchSizes,
    scorer: Scorer | None = None,
    kind: Callable[..., Run] = Run,
) -> Run:
    """Return a run over given parts; it touches no file.

    Args:
        settings: its loop, batch sizes, staleness, partial rollouts and `num_rollout` are those that are simulated. Generator,
            reward, filter and evaluation are not: each prompt gets one turn, each sample the same reward, no group is dropped.
        registry: has the loop.
        engine: generates.
        trainer: learns.
        source: has the prompts.
        sizes: of batches.
        scorer: gives rewards; without one every sample gets the same, at once.
        kind: `Run`, or what adds something to it.
    """
    return kind(
        settings=settings,
        registry=registry,
        run_dir=NoFolder(Path("/dev/null")),
        tokenizer=NumberTokenizer(),
        source=source,
        eval_source=None,
        eval_start={},
        buffer=FifoBuffer(sizes.n_samples_per_prompt),
        engine=engine,
        trainer=trainer,
        scorer=scorer or cast(Scorer, SimulatedRewards(0.0)),
        trackers=[],
        sizes=sizes,
        num_steps=settings.run.num_rollout or 1,
        rollout_fn=rollout,
        generate=single_turn,
        drop_reason=failure_of,
        make_batch=functools.partial(
            make_batch,
            global_batch_size=sizes.global_batch_size,
            temperature=settings.rollout.rollout_temperature,
            transform=raw,
            reducer=per_token,
        ),
    )


def simulated_run(
    settings: Settings, registry: Registry, costs: Costs, cluster: Cluster, trace: Trace
) -> tuple[SimulatedRun, SimulatedEngine, SimulatedTrainer]:
    """Return a run whose groups are one sample each, which stands for all of the group: loops and dispatcher decide on groups.

    Args:
        settings: see `make_run`.
        registry: has the loop.
        costs: of the parts.
        cluster: how many there are.
        trace: lengths.
    """
    real = batch_sizes(settings)
    n, prompts = real.n_samples_per_prompt, real.rollout_batch_size
    sizes = replace(real, n_samples_per_prompt=1, global_batch_size=prompts, num_steps_per_rollout=1)
    engine = SimulatedEngine(
        costs.engine,
        costs.update,
        replicas=cluster.replicas,
        trace=trace,
        samples=n,
        concurrency=cast("int | None", settings.rollout.rollout_concurrency),
        in_flight=settings.train.update_weights_in_flight,
        slowdown=costs.slowdown,
    )
    trainer = SimulatedTrainer(
        costs.trainer, costs.update, gpus=cluster.trainer_gpus, samples=n, cores=engine.cores
    )
    run = make_run(
        settings,
        registry,
        engine=engine,
        trainer=trainer,
        source=SimulatedPrompts(trace, samples=n),
        sizes=sizes,
        scorer=cast(Scorer, SimulatedRewards(costs.reward_s)),
        kind=functools.partial(SimulatedRun, eval_s=costs.eval_s, save_s=costs.save_s),
    )
    return cast(SimulatedRun, run), engine, trainer


def simulate(
    settings: Settings, registry: Registry, costs: Costs, cluster: Cluster, trace: Trace
) -> Simulated:
    """Drive a run over simulated parts in virtual time, by the loop of its settings; args are those of `simulated_run`.

    Raises:
        ConfigError: the loop refuses the settings.
    """
    result, _ = run_in_virtual_time(_simulated(settings, registry, costs, cluster, trace))
    return result


async def _simulated(
    settings: Settings, registry: Registry, costs: Costs, cluster: Cluster, trace: Trace
) -> Simulated:
    run, engine, trainer = simulated_run(settings, registry, costs, cluster, trace)
    times = StepTimes()
    run.trackers = [times]
    attach(registry, run.trackers)
    loop = registry.resolve("slime.loops", settings.run.loop)
    try:
        await loop(run)
    finally:
        await run.close()
        gc.collect()
    for replica in engine.replicas:
        replica.settle()
    wall_s, n = sum(times.seconds) + run.paused_s, cluster.replicas
    busy_s, tokens = (
        sum(each.busy_s for each in engine.replicas),
        sum(each.tokens for each in engine.replicas),
    )
    return Simulated(
        loop=settings.run.loop,
        steps=len(times.seconds),
        wall_s=wall_s,
        step_s=median(times.seconds),
        samples=trainer.samples,
        tokens=trainer.tokens,
        staleness_mean=sum(times.ages) / len(times.ages),
        staleness_max=max(times.ages),
        engine_idle=max(0.0, 1 - busy_s / (n * wall_s)),
        trainer_idle=max(0.0, 1 - trainer.train_s / wall_s),
        update_share=times.update_s / wall_s,
        running=tokens / max(1, sum(each.steps for each in engine.replicas)),
        step_times=tuple(times.seconds),
    )


class NoFolder(RunDir):
    """The folder of a run that records nothing."""

    def write_samples(self, step: int, groups: Iterable[Group], *, evaluation: bool = False) -> None:
        """Write nothing."""

    def write_dropped(self, step: int, dropped: Iterable[tuple[Group, str]]) -> None:
        """Write nothing."""
