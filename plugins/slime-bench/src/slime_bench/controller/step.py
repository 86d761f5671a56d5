"""One step of a run with the null engine and trainer: stage by stage, and whole as the loop takes it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.rollout.group import run_group
from slime_core.run.assemble import assemble
from slime_core.run.metrics import request_metrics, rollout_metrics
from slime_core.run.run import Run
from slime_core.run.start import start
from slime_core.samples import Group, TrainBatch
from slime_megatron.batch.rank_schedule import rank_schedule

from slime_bench.memory_in_use import bytes_in_use, peak_bytes

_NULL = "slime_bench.controller.null:"
_TABULAR = "slime_core.testing.tabular:"
_PROMPT = "whatisfortytwo"
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a step."""

    prompts: int
    samples: int
    """Samples of each prompt."""
    tokens: int
    """Response tokens of each sample."""
    optimizer_steps: int = 1
    """Optimizer steps that the samples are cut into."""
    ranks: int = 64
    """Data-parallel ranks that each of these is divided among."""

    @property
    def n_samples(self) -> int:
        """Samples of the step."""
        return self.prompts * self.samples


@dataclass
class Clock:
    """Adds up seconds, and of them those that this process was on its core, by stage."""

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_s[name] = self.wall_s.get(name, 0.0) + time.perf_counter() - wall
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.process_time() - cpu


@dataclass(frozen=True)
class Measured:
    """What a step took, on average of those that were timed."""

    wall_s: dict[str, float]
    """Seconds, by stage."""
    cpu_s: dict[str, float]
    """Seconds that the process was on its core: what is left where others use the machine, too."""
    first_cpu_s: dict[str, float]
    """Those of the first step, which touches all memory for the first time."""
    raw_bytes: int
    """Bytes of the ids and log-probs of the samples, and of the arrays of the batch."""
    peak_bytes: int | None
    """Most bytes in use during the steps, beyond those before the first; None where the system does not tell."""


def measure(shape: Shape, how: str, n_timed: int, n_before: int) -> Measured:
    """Take steps on one core: some that warm up, and some that are timed; memory is that of all of them.

    Args:
        shape: their size.
        how: `stages`, or `whole`.
        n_timed: steps that are timed; what one of them takes is their mean.
        n_before: steps before them, one at least.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    take = {"stages": _by_stages, "whole": _whole}[how]

    async def steps() -> Measured:
        async with null_run(shape, steps=n_before + n_timed) as run:
            first, others, clock = Clock(), Clock(), Clock()
            before = bytes_in_use(_CPU)
            raw = await take(run, 1, shape, first)
            for step in range(2, n_before + n_timed + 1):
                await take(run, step, shape, others if step <= n_before else clock)
            peak = peak_bytes(_CPU)
        more = None if before is None or peak is None else peak - before
        wall_s, cpu_s = (
            {name: seconds / n_timed for name, seconds in each.items()}
            for each in (clock.wall_s, clock.cpu_s)
        )
        return Measured(wall_s, cpu_s, first.cpu_s, raw, more)

    with contextlib.redirect_stdout(None):
        return asyncio.run(steps())


async def _by_stages(run: Run, step: int, shape: Shape, clock: Clock) -> int:
    scorer, finished = run.scorer, list[Group]()
    with clock.stage("take"):
        taken = run.take(shape.prompts)
    run.scorer = None
    with clock.stage("generate"):
        for group in taken:
            finished.append(await run_group(run, group, params_of=run.sampling_params))
    del taken
    run.scorer = scorer
    with clock.stage("reward"):
        for group in finished:
            await run.score(group)
    with clock.stage("filter"):
        groups = [group for group in finished if run.drop_reason(group) is None]
    with clock.stage("metrics"):
        rollout_metrics(groups, reward_key=None, drops=Counter())
        request_metrics(groups, rollout_s=1.0)
    with clock.stage("record"):
        run.run_dir.write_samples(step, groups)
    with clock.stage("batch"):
        batch = run.batch(step, groups)
    with clock.stage("schedule"):
        schedule(batch, shape.ranks)
    with clock.stage("record"):
        run.run_dir.flush()
    return _raw_bytes(groups, batch)


async def _whole(run: Run, step: int, shape: Shape, clock: Clock) -> int:
    with clock.stage("whole"):
        groups = await run.rollout(step)
        batch = run.batch(step, groups)
        schedule(batch, shape.ranks)
        await run.train(batch)
        await run.end_step(step)
        run.run_dir.flush()
    return _raw_bytes(groups, batch)


def schedule(batch: TrainBatch, n_ranks: int) -> list[Any]:
    """Divide each optimizer step among ranks, in micro-batches of at most eight times the longest sample."""
    longest = int(batch.lengths.max())
    return [
        rank_schedule(
            batch,
            samples.tolist(),
            n_ranks=n_ranks,
            max_tokens=8 * longest,
            share=False,
            cost=lambda group: group.n_tokens,
        )
        for samples in batch.optimizer_steps
    ]


def _raw_bytes(groups: Sequence[Group], batch: TrainBatch) -> int:
    log_probs = 0 if batch.rollout_log_probs is None else batch.rollout_log_probs.nbytes
    own = batch.tokens.nbytes + log_probs
    return 2 * own + batch.loss_mask.nbytes + batch.weights.nbytes


@contextlib.asynccontextmanager
async def null_run(shape: Shape, *more: str, steps: int = 3) -> AsyncIterator[Run]:
    """Yield a run that is ready for its first step; its folder goes with it."""
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name:
        folder, registry = Path(name), Registry.from_environment()
        data = folder / "prompts.jsonl"
        data.write_text((json.dumps({"input": _PROMPT, "label": "42"}) + "\n") * shape.prompts)
        flags = {
            "hf-checkpoint": folder, "tokenizer": f"{_NULL}load_tokenizer",
            "prompt-data": data, "label-key": "label",
            "output-dir": folder, "run-name": "controller", "tracker": "jsonl", "num-rollout": steps, "save-interval": "none",
            "rollout-engine": f"{_NULL}create_engine", "train-backend": f"{_NULL}create_trainer",
            "rollout-batch-size": shape.prompts, "n-samples-per-prompt": shape.samples,
            "global-batch-size": shape.n_samples // shape.optimizer_steps, "rollout-max-response-len": shape.tokens,
            "custom-rm-path": f"{_NULL}even", "dynamic-sampling-filter-path": "nonzero-std",
            "advantage-estimator": f"{_TABULAR}credit", "loss-type": f"{_TABULAR}reinforce",
            "loss-reducer": f"{_TABULAR}per_token",
        }  # fmt: skip
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        run = await assemble(load_settings([], [*words, *more], registry=registry), registry)
        try:
            await start(run)
            await run.begin()
            yield run
        finally:
            await run.close()
