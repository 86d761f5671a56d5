"""Logs of turns: a JSON file of each turn and of each trajectory, and a line of the console."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_kernels.turns.history import KernelAttempt

logger = logging.getLogger(__name__)


def log_turn(folder: Path | None, instance: str, attempt: KernelAttempt) -> None:
    """Say in a line what became of a turn, and write `turn_{instance}_t{n}_{timestamp}.json`."""
    verdict, timing = attempt.verdict, attempt.verdict.timing
    speedup = "" if timing is None else f", {timing.speedup:.2f}x ({timing.source}, {timing.target})"
    marks = " ".join(
        f"{'✓' if passed else '✗'} {what}"
        for what, passed in (("compiled", verdict.compiled), ("correct", verdict.correct))
    )
    logger.info("%s turn %d: %s%s, reward %.2f", instance, attempt.turn, marks, speedup, verdict.reward)
    if folder is not None:
        _write(folder / f"turn_{instance}_t{attempt.turn}_{time.time_ns()}.json", attempt.to_dict())


def log_trajectory(
    folder: Path | None, instance: str, attempts: Sequence[KernelAttempt], *, ended_by: str, value: float
) -> None:
    """Write `trajectory_{instance}_{timestamp}.json`: all turns, what ended them, and the return."""
    if folder is None:
        return
    trajectory = {
        "instance_id": instance,
        "history": [attempt.to_dict() for attempt in attempts],
        "ended_by": ended_by,
        "aggregated_return": value,
    }
    _write(folder / f"trajectory_{instance}_{time.time_ns()}.json", trajectory)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)
