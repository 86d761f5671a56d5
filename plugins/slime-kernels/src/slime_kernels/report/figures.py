"""Figures of outcomes: rates, fast_p, and what a turn adds to the one before."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slime_kernels.report.outcomes import TrajectoryOutcome

#: Speedups p of which fast_p is told.
FAST = (1.0, 1.5, 2.0)
#: Rows of a table over steps; more steps are taken together.
_MOST_ROWS = 12


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of some trajectories, each counted by its best turn."""

    n: int
    compiled: float
    correct: float
    fast: Mapping[float, float]
    """p -> fast_p: the share that is correct and more than p times as fast as the baseline. Source: KernelBench."""
    speedup: float | None
    """Geometric mean over what is correct and timed; None where nothing is."""
    turns: float
    value: float
    """Mean return."""


@dataclass(frozen=True, kw_only=True)
class TurnFigures:
    """Of the attempts of one turn."""

    turn: int
    """From 0."""
    n: int
    compiled: float
    correct: float
    reward: float
    improved: float | None
    """Share whose reward is more than that of the turn before; None for the first."""


def fast_p(outcomes: Sequence[TrajectoryOutcome], p: float) -> float:
    """Return the share of trajectories, one or more, whose best kernel is correct and more than p times as fast."""
    return _mean(one.best.correct and one.best.speedup > p for one in outcomes)


def figures_of(outcomes: Sequence[TrajectoryOutcome]) -> Figures:
    """Return the figures of one trajectory or more."""
    best = [one.best for one in outcomes]
    logs = [math.log(one.speedup) for one in best if one.correct and one.speedup > 0]
    return Figures(
        n=len(outcomes),
        compiled=_mean(one.compiled for one in best),
        correct=_mean(one.correct for one in best),
        fast={p: fast_p(outcomes, p) for p in FAST},
        speedup=math.exp(_mean(logs)) if logs else None,
        turns=_mean(len(one.turns) for one in outcomes),
        value=_mean(one.value for one in outcomes),
    )


def by_steps(outcomes: Sequence[TrajectoryOutcome], *, most: int = _MOST_ROWS) -> dict[str, Figures]:
    """Return the figures of each step, or of several in a row where there are more than `most`."""
    steps = sorted({one.step for one in outcomes})
    width = math.ceil(len(steps) / most) if steps else 1
    parts = [steps[begin : begin + width] for begin in range(0, len(steps), width)]
    of_step = {step: number for number, part in enumerate(parts) for step in part}
    found = _grouped(outcomes, lambda one: of_step[one.step])
    return {_name(parts[number]): figures_of(found[number]) for number in sorted(found)}


def by_level(outcomes: Sequence[TrajectoryOutcome]) -> dict[int, Figures]:
    """Return the figures of each level."""
    found = _grouped(outcomes, lambda one: one.level)
    return {level: figures_of(found[level]) for level in sorted(found)}


def by_turn(outcomes: Sequence[TrajectoryOutcome]) -> list[TurnFigures]:
    """Return the figures of each turn, over the trajectories that had it."""
    most = max((len(one.turns) for one in outcomes), default=0)
    return [_turn(turn, [one for one in outcomes if len(one.turns) > turn]) for turn in range(most)]


def _turn(turn: int, outcomes: Sequence[TrajectoryOutcome]) -> TurnFigures:
    attempts = [one.turns[turn] for one in outcomes]
    gains = [one.turns[turn].reward > one.turns[turn - 1].reward for one in outcomes] if turn else []
    return TurnFigures(
        turn=turn,
        n=len(attempts),
        compiled=_mean(one.compiled for one in attempts),
        correct=_mean(one.correct for one in attempts),
        reward=_mean(one.reward for one in attempts),
        improved=_mean(gains) if gains else None,
    )


def _grouped(
    outcomes: Iterable[TrajectoryOutcome], key: Callable[[TrajectoryOutcome], int]
) -> Mapping[int, list[TrajectoryOutcome]]:
    found: defaultdict[int, list[TrajectoryOutcome]] = defaultdict(list)
    for one in outcomes:
        found[key(one)].append(one)
    return found


def _name(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
