"""Outcomes of trajectories, read from the records of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.rundir.records import read_records

from slime_kernels.problems.problem import PROBLEM_KEY
from slime_kernels.turns.record import TURNS_KEY

_FILE = re.compile(r"(eval_)?step_([0-9]+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class TurnOutcome:
    """What became of one attempt."""

    compiled: bool
    correct: bool
    speedup: float
    """Over the baseline; 0 where nothing is known of it."""
    reward: float


@dataclass(frozen=True, kw_only=True)
class TrajectoryOutcome:
    """What became of a trajectory."""

    step: int
    evaluation: bool
    level: int
    turns: Sequence[TurnOutcome]
    """One or more."""
    value: float
    """Its return: what the first of its samples was rewarded with."""
    ended_by: str | None
    """Why no further turn followed; None in runs of one turn."""

    @property
    def best(self) -> TurnOutcome:
        """The attempt that came furthest."""
        return max(self.turns, key=lambda one: (one.correct, one.compiled, one.reward))


def read_outcomes(run: Path) -> list[TrajectoryOutcome]:
    """Return the outcomes of all trajectories that were trained on or evaluated, by step.

    Samples of one trajectory count once. What was aborted, and what is of another source, is left out.
    """
    files = [(found, path) for path in (run / "rollouts").iterdir() if (found := _FILE.fullmatch(path.name))]
    files.sort(key=lambda one: (int(one[0][2]), one[1].name))
    return [
        outcome
        for found, path in files
        for outcome in _outcomes(path, step=int(found[2]), evaluation=bool(found[1]))
    ]


def _outcomes(path: Path, *, step: int, evaluation: bool) -> Iterator[TrajectoryOutcome]:
    seen = set()
    for number, row in enumerate(read_records(path, columns=False)):
        reward, metadata = row.get("reward"), row.get("metadata") or {}
        if PROBLEM_KEY not in metadata or not isinstance(reward, Mapping):
            continue
        execution = row.get("rollout_id")
        key = (row.get("group_index"), row.get("index") if execution is None else execution)
        if key != (None, None) and key in seen:
            continue
        seen.add(key if key != (None, None) else number)
        record = metadata.get(TURNS_KEY)
        yield TrajectoryOutcome(
            step=step,
            evaluation=evaluation,
            level=metadata[PROBLEM_KEY]["level"],
            turns=[_of_reward(reward)] if record is None else [_of_entry(one) for one in record["history"]],
            value=float(reward["score"]),
            ended_by=None if record is None else record["ended_by"],
        )


def _of_reward(reward: Mapping[str, Any]) -> TurnOutcome:
    return TurnOutcome(
        compiled=bool(reward["compiled"]),
        correct=bool(reward["correct"]),
        speedup=float(reward["speedup"]),
        reward=float(reward["score"]),
    )


def _of_entry(entry: Mapping[str, Any]) -> TurnOutcome:
    result = entry["eval_result"]
    return TurnOutcome(
        compiled=result["compiled"],
        correct=result["correctness"],
        speedup=result["speedup"] or 0.0,
        reward=entry["reward"],
    )
