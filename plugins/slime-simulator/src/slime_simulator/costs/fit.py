"""Costs by least squares from the folders of runs: their metrics, events, and the lengths and times of their samples."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from slime_core.errors import ConfigError, Problem

from slime_simulator.costs.costs import Costs, EngineCosts, Slowdown, TrainerCosts, UpdateCosts
from slime_simulator.costs.recorded import RecordedRun, Span, Step, typical

#: Seconds by which requests may be submitted before training begins, and count as submitted with it.
_SOON_S = 0.05
#: Spread of tokens, over their mean, below which a step's fixed time and that of its tokens cannot be told apart.
_LEAST_SPREAD = 0.02


def fit(runs: Sequence[RecordedRun], *, slots: int, replicas: int = 1) -> Costs:
    """Return the costs of runs of the same parts.

    Args:
        runs: as `read_run` returns them: of the loop `sync`, which say what each part takes alone; and perhaps of `one-step-off`,
            which say how much longer it takes while the other is at work.
        slots: requests that each replica of their engine decoded together at most.
        replicas: of the engine.

    Raises:
        ConfigError: it cannot be told what decoding took: requests of another loop are not all submitted at once.
    """
    problems = [_problem(run) for run in runs if _is_overlapping(run) is None]
    alone = [run for run in runs if _is_overlapping(run) is False]
    if not alone and not problems:
        wanted = "one of the loop sync among them, in which each part is at work alone"
        problems.append(Problem("--from-run", "runs of the loop one-step-off alone", wanted))
    if problems:
        raise ConfigError(problems)
    steps, gpus = [step for run in alone for step in run.warm], _trainer_gpus(alone[0].config)
    update_s = typical(step.metrics.get("perf/update_weights_time", 0.0) for step in steps)
    costs = Costs(
        engine=fit_engine(
            steps,
            slots=slots,
            replicas=replicas,
            shares_prompts=any(run.engine_shares_prompts for run in alone),
        ),
        trainer=fit_trainer(
            steps,
            gpus=gpus,
            shares_prompts=any(run.trainer_shares_prompts for run in alone),
        ),
        update=UpdateCosts(send_s=update_s, pause_s=update_s),
        reward_s=typical(seconds for step in steps for seconds in step.reward_s),
        eval_s=typical(seconds for run in runs for seconds in run.evaluations),
        save_s=typical(seconds for run in runs for seconds in run.saves),
    )
    beside = [step for run in runs if _is_overlapping(run) for step in run.warm]
    if not beside:
        return costs
    between_s = median(_between_s(step.metrics) for step in steps)
    return replace(
        costs, slowdown=fit_slowdown(beside, costs, gpus=gpus, between_s=between_s, replicas=replicas)
    )


def _is_overlapping(run: RecordedRun) -> bool | None:
    """Say whether engine and trainer were at work at the same time; None for what cannot be fitted."""
    if run.config.get("rollout", {}).get("partial_rollout"):
        return None
    return {"sync": False, "one-step-off": True}.get(run.loop)


def _problem(run: RecordedRun) -> Problem:
    partial = ", with partial rollouts" if run.config.get("rollout", {}).get("partial_rollout") else ""
    wanted = (
        "one of the loop sync or one-step-off without partial rollouts, whose requests are submitted together"
    )
    return Problem("--from-run", f"{run.folder}, a run of the loop {run.loop}{partial}", wanted)


def _trainer_gpus(config: dict[str, dict[str, Any]]) -> int:
    cluster = config.get("cluster", {})
    return int(cluster.get("actor_num_nodes", 1)) * int(cluster.get("actor_num_gpus_per_node", 1))


def fit_trainer(steps: Sequence[Step], *, gpus: int, shares_prompts: bool = False) -> TrainerCosts:
    """Return what the trainer's steps took; what the loop does between its phases counts as part of them."""
    seconds = np.array([step.metrics["perf/train_time"] for step in steps])
    tokens = np.array([float(step.tokens(shared=shares_prompts)) for step in steps])
    between = median(_between_s(step.metrics) for step in steps)
    if tokens.std() < _LEAST_SPREAD * tokens.mean():
        fixed, per_token = 0.0, float(seconds.sum() / tokens.sum())
    else:
        fixed, per_token = least_squares(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
    return TrainerCosts(fixed_s=fixed + between, token_gpu_s=per_token * gpus, shares_prompts=shares_prompts)


def _between_s(metrics: dict[str, float]) -> float:
    """Return the seconds of a step that belong to none of its phases: batches, records, the loop itself."""
    phases = [metrics.get(f"perf/{name}_time", 0.0) for name in ("rollout", "train", "update_weights")]
    return max(0.0, metrics["perf/step_time"] - sum(phases))


def fit_engine(
    steps: Sequence[Step], *, slots: int, replicas: int = 1, shares_prompts: bool = False
) -> EngineCosts:
    """Return what decoding took, from steps whose requests were submitted together, in the order of the samples.

    Counted in decode steps the schedule of such requests depends on their lengths alone; what a request waits is then linear in
    the coefficients: see `schedule`. They are fitted to the times between two answers: a delay counts once, and not in all
    answers behind it.

    Raises:
        ConfigError: no sample says how long it took.
    """
    unknown = EngineCosts(step_s=0.0, slots=slots, shares_prompts=shares_prompts)
    known = [
        _between_answers(step, slice(first, None, replicas), unknown)
        for step in steps
        if len(step.generate_s) == len(step.responses)
        for first in range(replicas)
    ]
    if not known:
        wanted = "rollouts whose samples have `timings` with `generate`"
        raise ConfigError([Problem("--from-run", "samples without the time that they took", wanted)])
    rows, seconds = zip(*known, strict=True)
    step_s, request_s, kv_token_s, prefill_token_s = least_squares(
        np.concatenate(rows), np.concatenate(seconds)
    )
    return EngineCosts(
        step_s=max(step_s, 1e-9),
        request_s=request_s,
        kv_token_s=kv_token_s,
        prefill_token_s=prefill_token_s,
        slots=slots,
        shares_prompts=shares_prompts,
    )


def fit_slowdown(
    steps: Sequence[Step], costs: Costs, *, gpus: int, between_s: float = 0.0, replicas: int = 1
) -> Slowdown:
    """Return how much longer each part took while the other was at work.

    The engine's factors are fitted to the times between two answers of which both came while the trainer trained. The trainer has
    done in its time what it does alone in the seconds that `costs` say: at full speed while the engine was idle, and at a
    speed that is asked for while it was not, summed over all steps.

    Args:
        steps: of a run of the loop `one-step-off`, in which a step's groups are generated while the one before is trained.
        costs: of the parts alone.
        gpus: that train.
        between_s: of the trainer's costs, what is no training.
        replicas: of the engine.

    Raises:
        ConfigError: they have no events.
    """
    spans = [(step, step.train, step.generation) for step in steps]
    known = [(step, train, done) for step, train, done in spans if train is not None and done is not None]
    if len(known) < len(spans):
        wanted = "runs with events.jsonl (without --no-events), to see when both parts were at work"
        raise ConfigError([Problem("--from-run", "steps without events", wanted)])
    both_s = train_s = alone_s = 0.0
    for number, (step, train, _) in enumerate(known):
        both_s += sum(train.overlap(generation) for _, _, generation in known[number : number + 2])
        train_s += train.end - train.begin
        alone_s += (
            costs.trainer.step_s(step.tokens(shared=costs.trainer.shares_prompts), gpus=gpus) - between_s
        )
    left_s = alone_s - (train_s - both_s)
    trainer = max(1.0, both_s / left_s) if left_s > 0 else 1.0
    rows = [
        _beside(step, generation, train, costs.engine, replicas=replicas)
        for (_, train, _), (step, _, generation) in itertools.pairwise(known)
    ]
    if not sum(map(len, rows)):
        return Slowdown(trainer=trainer)
    found = np.concatenate(rows)
    factors = least_squares(found[:, :2], found[:, 2])
    return Slowdown(step=max(1.0, factors[0]), request=max(1.0, factors[1]), trainer=trainer)


def _beside(
    step: Step, generation: Span, train: Span, costs: EngineCosts, *, replicas: int
) -> NDArray[np.float64]:
    """Return what passed between answers that came while the trainer trained.

    Returns:
        [N, 3]: seconds that decode steps take alone whatever is in them, those of all else, and those that it took.
    """
    found = []
    for first in range(replicas):
        own = slice(first, None, replicas)
        passed, seconds = _between_answers(step, own, costs)
        ends = generation.begin + np.cumsum(seconds)
        is_beside = (ends <= train.end) & (ends - seconds >= train.begin - _SOON_S)
        rest = passed[:, 1:] @ [costs.request_s, costs.kv_token_s, costs.prefill_token_s]
        found.append(np.stack([passed[:, 0] * costs.step_s, rest, seconds], axis=1)[is_beside])
    return np.concatenate(found)


def _between_answers(
    step: Step, own: slice, costs: EngineCosts
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what passed between two answers of a replica: as `schedule` counts it, and the seconds that it took."""
    prefills = step.prefills[own] if costs.shares_prompts else step.prompts[own]
    passed = schedule(step.prompts[own], step.responses[own], slots=costs.slots, prefills=prefills)
    in_turn = np.argsort(passed[:, 0], kind="stable")
    seconds = np.array(step.generate_s[own])[in_turn]
    return np.diff(passed[in_turn], axis=0, prepend=0.0), np.diff(seconds, prepend=0.0)


def schedule(
    prompts: Sequence[int], responses: Sequence[int], *, slots: int, prefills: Sequence[int] | None = None
) -> NDArray[np.float64]:
    """Return what passes until each request is answered, where all are submitted at once to a replica.

    Args:
        prompts: tokens of each.
        responses: tokens of each.
        slots: requests that are decoded together.
        prefills: tokens of each prompt that are to be prefilled; all of them when not given.

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
            now[3] += (prompts if prefills is None else prefills)[request]
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
        trainer=replace(
            costs.trainer,
            fixed_s=costs.trainer.fixed_s / trainer,
            token_gpu_s=costs.trainer.token_gpu_s / trainer,
        ),
    )
