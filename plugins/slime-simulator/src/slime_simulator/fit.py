"""Costs by least squares from the folder of a run: its metrics, and the lengths and times of its samples."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from slime_core.errors import ConfigError, Problem
from slime_core.rundir.records import read_records
from slime_core.rundir.rundir import RunDir

from slime_simulator.costs import Costs, EngineCosts, TrainerCosts, UpdateCosts
from slime_simulator.traces import Recorded

#: Steps at the begin that are left out where enough others are left: they compile, allocate and fill caches.
_WARM_UP = 1
_ENOUGH = 4
#: Spread of tokens, over their mean, below which a step's fixed time and that of its tokens cannot be told apart.
_LEAST_SPREAD = 0.02


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is known of a step of a run."""

    metrics: dict[str, float]
    prompts: list[int]
    """Tokens of each sample's prompt, in the order of the samples."""
    responses: list[int]
    generate_s: list[float]
    """Seconds of each sample from its submission to its answer; empty where a sample has none."""
    reward_s: list[float]

    @property
    def tokens(self) -> int:
        """Tokens of prompts and responses."""
        return sum(self.prompts) + sum(self.responses)


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run's folder says of its costs."""

    config: dict[str, dict[str, Any]]
    steps: list[Step]
    lengths: dict[int, tuple[int, int]]
    """Tokens of prompt and response, by the index of the sample."""

    @property
    def warm(self) -> list[Step]:
        """The steps after those that warm up."""
        return self.steps[_WARM_UP:] if len(self.steps) >= _ENOUGH else self.steps

    @property
    def trace(self) -> Recorded:
        """The lengths in the order of the samples' indices."""
        prompts, responses = zip(*(self.lengths[index] for index in sorted(self.lengths)), strict=True)
        return Recorded(prompts, responses)


def read_run(folder: Path) -> RecordedRun:
    """Read the folder of a run.

    Raises:
        ConfigError: it has no step with metrics and samples; or a file is not what a run writes.
    """
    run_dir = RunDir(folder)
    rows = {int(row["step"]): row for row in run_dir.read_metrics() if row.get("perf/step_time") is not None}
    steps, lengths = [], {}
    for number, row in sorted(rows.items()):
        file = run_dir.rollout_file(number)
        if not file.is_file():
            continue
        samples = sorted(read_records(file, columns=True), key=lambda sample: sample["index"] or 0)
        for sample in samples:
            total, response = len(sample["tokens"]), int(sample["response_length"])
            lengths[int(sample["index"] or 0)] = total - response, response
        timings = [sample["timings"] for sample in samples]
        steps.append(
            Step(
                metrics={name: float(value) for name, value in row.items() if isinstance(value, int | float)},
                prompts=[len(sample["tokens"]) - int(sample["response_length"]) for sample in samples],
                responses=[int(sample["response_length"]) for sample in samples],
                generate_s=[each["generate"] for each in timings if "generate" in each],
                reward_s=[each["reward"] for each in timings if "reward" in each],
            )
        )
    if not steps:
        wanted = "the folder of a run with metrics.jsonl and rollouts/, of one step at least"
        raise ConfigError([Problem("--from", f"{folder}, without a step that is recorded", wanted)])
    return RecordedRun(config=run_dir.read_config(), steps=steps, lengths=lengths)


def fit(run: RecordedRun, *, slots: int, replicas: int = 1) -> Costs:
    """Return the costs of a run of the loop `sync`.

    Args:
        run: as `read_run` returns it.
        slots: requests that each of its replicas decoded together at most.
        replicas: of its engine.

    Raises:
        ConfigError: it cannot be told what decoding took: requests of another loop are not all submitted at once.
    """
    loop = run.config.get("run", {}).get("loop", "sync")
    rollout = run.config.get("rollout", {})
    if loop not in ("sync", "slime-core/sync") or rollout.get("partial_rollout"):
        found = (
            f"a run of the loop {loop}{', with partial rollouts' if rollout.get('partial_rollout') else ''}"
        )
        wanted = "one of the loop sync without partial rollouts, whose requests are submitted together"
        raise ConfigError([Problem("--from", found, wanted)])
    rewards = [seconds for step in run.warm for seconds in step.reward_s]
    update_s = median(step.metrics.get("perf/update_weights_time", 0.0) for step in run.warm)
    return Costs(
        engine=fit_engine(run.warm, slots=slots, replicas=replicas),
        trainer=fit_trainer(run.warm, gpus=_trainer_gpus(run.config)),
        update=UpdateCosts(send_s=update_s, pause_s=update_s),
        reward_s=median(rewards) if rewards else 0.0,
    )


def _trainer_gpus(config: dict[str, dict[str, Any]]) -> int:
    cluster = config.get("cluster", {})
    return int(cluster.get("actor_num_nodes", 1)) * int(cluster.get("actor_num_gpus_per_node", 1))


def fit_trainer(steps: Sequence[Step], *, gpus: int) -> TrainerCosts:
    """Return what the trainer's steps took; what the loop does between its phases counts as part of them."""
    seconds = np.array([step.metrics["perf/train_time"] for step in steps])
    tokens = np.array([float(step.tokens) for step in steps])
    between = median(_between_s(step.metrics) for step in steps)
    if tokens.std() < _LEAST_SPREAD * tokens.mean():
        fixed, per_token = 0.0, float(seconds.sum() / tokens.sum())
    else:
        fixed, per_token = least_squares(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
    return TrainerCosts(fixed_s=fixed + between, token_gpu_s=per_token * gpus)


def _between_s(metrics: dict[str, float]) -> float:
    """Return the seconds of a step that belong to none of its phases: batches, records, the loop itself."""
    phases = [metrics.get(f"perf/{name}_time", 0.0) for name in ("rollout", "train", "update_weights")]
    return max(0.0, metrics["perf/step_time"] - sum(phases))


def fit_engine(steps: Sequence[Step], *, slots: int, replicas: int = 1) -> EngineCosts:
    """Return what decoding took, from steps whose requests were submitted together, in the order of the samples.

    Counted in decode steps the schedule of such requests depends on their lengths alone; what a request waits is then linear in
    the coefficients: see `schedule`.

    Raises:
        ConfigError: no sample says how long it took.
    """
    rows, seconds = [], []
    for step in steps:
        if len(step.generate_s) != len(step.responses):
            continue
        for first in range(replicas):
            own = slice(first, None, replicas)
            rows.append(schedule(step.prompts[own], step.responses[own], slots=slots))
            seconds += step.generate_s[own]
    if not rows:
        wanted = "rollouts whose samples have `timings` with `generate`"
        raise ConfigError([Problem("--from", "samples without the time that they took", wanted)])
    found = least_squares(np.concatenate(rows), np.array(seconds))
    step_s, request_s, kv_token_s, prefill_token_s = found
    return EngineCosts(
        step_s=max(step_s, 1e-9),
        request_s=request_s,
        kv_token_s=kv_token_s,
        prefill_token_s=prefill_token_s,
        slots=slots,
    )


def schedule(prompts: Sequence[int], responses: Sequence[int], *, slots: int) -> NDArray[np.float64]:
    """Return what passes until each request is answered, where all are submitted at once to a replica.

    Returns:
        [N, 4]: decode steps; running requests, summed over these steps; tokens in the KV cache, summed over these steps;
        tokens of prefill.
    """
    passed = np.zeros((len(responses), 4))
    waiting = list(range(len(responses)))[::-1]
    running: list[tuple[int, int]] = []
    now, kv = np.zeros(4), 0
    while waiting or running:
        while waiting and len(running) < slots:
            request = waiting.pop()
            heapq.heappush(running, (int(now[0]) + max(1, responses[request]), request))
            kv += prompts[request]
            now[3] += prompts[request]
        n, count = len(running), running[0][0] - int(now[0])
        now[:3] += count, n * count, kv * count + n * count * (count - 1) / 2
        kv += n * count
        while running and running[0][0] == now[0]:
            _, request = heapq.heappop(running)
            kv -= prompts[request] + max(1, responses[request])
            passed[request] = now
    return passed


def least_squares(features: NDArray[np.float64], wanted: NDArray[np.float64]) -> list[float]:
    """Return the coefficients, none below 0, that fit best: the best of those of each subset of the features."""
    n = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    best, least = [0.0] * n, float((wanted**2).sum())
    for size in range(1, n + 1):
        for chosen in itertools.combinations(range(n), size):
            columns = list(chosen)
            found, *_ = np.linalg.lstsq(features[:, columns] / scale[columns], wanted, rcond=None)
            residual = float(((features[:, columns] / scale[columns] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and residual < least * (1 - 1e-9):
                least, best = residual, [0.0] * n
                for column, value in zip(columns, found, strict=True):
                    best[column] = float(value / scale[column])
    return best


def scaled(costs: Costs, *, engine: float, trainer: float) -> Costs:
    """Return the costs of an engine and a trainer that are so many times as fast, as of other devices."""
    old = costs.engine
    return replace(
        costs,
        engine=replace(
            old,
            step_s=old.step_s / engine,
            request_s=old.request_s / engine,
            kv_token_s=old.kv_token_s / engine,
            prefill_token_s=old.prefill_token_s / engine,
        ),
        trainer=TrainerCosts(
            fixed_s=costs.trainer.fixed_s / trainer, token_gpu_s=costs.trainer.token_gpu_s / trainer
        ),
    )
