"""`WatchedRun`: the state of a run as its folder tells it, read again and again while another process writes it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_core.errors import CheckpointError
from slime_core.files.lock import LOCK
from slime_core.files.strict_read import Unreadable, json_object, read_file
from slime_core.rundir.activity import Activity, StepPlan
from slime_core.rundir.checkpoint import latest
from slime_core.rundir.line_tail import LineTail
from slime_core.rundir.rundir import RunDir

#: How a run stands: its summary says the first three; `gone` is a process that ended without one.
Status = Literal["completed", "interrupted", "failed", "gone", "starting", "running"]
#: Bytes of each file that are read at once at most: of a larger one the end.
_MOST_EVENTS, _MOST_METRICS, _MOST_LOG = 16 << 20, 8 << 20, 1 << 20
#: Rows of metrics and warnings that are kept, and steps whose times the estimate of what is left is of.
_ROWS, _WARNINGS, _STEPS_OF_ESTIMATE = 1000, 3, 20
#: Seconds for which clocks of file system and host may differ, and in which a run that has told how it ended closes its parts.
_SKEW_S, _CLOSING_S = 5.0, 60.0
#: What is larger is no count of anything, and no float, either.
_HUGE = 1 << 63
_OWNER = re.compile(r"process ([0-9]+) on (.*)")
_WARNING = re.compile(r"^[0-9-]+ ([0-9:]+)\S* (WARNING|ERROR|CRITICAL) \S+ (.*)")


@dataclass(frozen=True)
class Owner:
    """The process that a run's lock names."""

    pid: int
    host: str

    @property
    def is_alive(self) -> bool | None:
        """Whether it runs; None where that cannot be seen from here, as it is on another host."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class WatchedRun:
    """A run's folder, of which nothing but files is needed. Call `refresh` before anything else, and for news.

    Args:
        folder: of the run.
        clock: Unix seconds.

    Raises:
        ConfigError: `config.toml` is not what a run writes.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.dir, self._clock = RunDir(folder), clock
        self.config = self.dir.read_config()
        self.plan = _step_plan(self.config)
        self.activity = Activity(self.plan)
        self._events = LineTail(self.dir.events, most_bytes=_MOST_EVENTS)
        self._metrics = LineTail(self.dir.metrics, most_bytes=_MOST_METRICS)
        self._log = LineTail(self.dir.path / "log.txt", most_bytes=_MOST_LOG)
        self.rows: deque[dict[str, float]] = deque(maxlen=_ROWS)
        self.warnings: deque[str] = deque(maxlen=_WARNINGS)
        self.n_warnings = 0
        self.summary: dict[str, Any] = {}
        self.checkpoint: tuple[int, float] | None = None
        """Step of the newest checkpoint, and when it was written."""
        self.owner: Owner | None = None
        self._locked_at = self._summed_up_at = 0.0
        self.now = clock()
        """When it was looked at, Unix seconds."""

    def refresh(self) -> None:
        """Read what is new."""
        self.now = self._clock()
        began_anew, lines = self._events.read()
        if began_anew:
            self.activity.forget()
        self.activity.take(lines)
        self._read_metrics()
        self._read_log()
        self.summary, self._summed_up_at = _read_json(self.dir.summary)
        with contextlib.suppress(CheckpointError, OSError):
            newest = latest(self.dir.checkpoints)
            self.checkpoint = None if newest is None else (newest.step, newest.path.stat().st_mtime)
        self._read_lock()

    def _read_metrics(self) -> None:
        began_anew, lines = self._metrics.read()
        if began_anew:
            self.rows.clear()
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int) and _is_number(row["step"]):
                    self.rows.append({name: value for name, value in row.items() if _is_number(value)})

    def _read_log(self) -> None:
        began_anew, lines = self._log.read()
        if began_anew:
            self.warnings.clear()
            self.n_warnings = 0
        for line in lines:
            if found := _WARNING.match(line.decode(errors="replace")):
                self.warnings.append(f"{found[1]} {found[3]}")
                self.n_warnings += 1

    def _read_lock(self) -> None:
        self.owner = None
        with contextlib.suppress(OSError, Unreadable):
            path = self.dir.path / LOCK
            self._locked_at = path.stat().st_mtime
            if found := _OWNER.fullmatch(read_file(path)[:300].decode(errors="replace")):
                self.owner = Owner(int(found[1]), found[2])

    @property
    def status(self) -> Status:
        """How it stands. A process that is alive, or on another host, is taken to run unless it wrote how it ended."""
        last_begin = self._last_begin
        slack = _CLOSING_S if self.activity.wall_clock is None else _SKEW_S
        has_ended = bool(self.summary) and self._summed_up_at > last_begin - slack
        is_alive = None if self.owner is None else self.owner.is_alive
        if has_ended and (is_alive is False or self._locked_at <= self._summed_up_at):
            status = self.summary.get("status")
            return status if status in ("completed", "interrupted", "failed") else "failed"
        if is_alive is False:
            return "gone"
        is_new = self._locked_at > max(last_begin, self._summed_up_at) + _SKEW_S
        return "starting" if is_new else "running"

    @property
    def _last_begin(self) -> float:
        """When the newest process that wrote anything began; where that was passed over, when it wrote last."""
        if self.activity.wall_clock is not None:
            return self.activity.wall_clock
        return self._events.changed_at or self._metrics.changed_at or 0.0

    @property
    def quiet_s(self) -> float | None:
        """Seconds since the run wrote events, metrics or log; None where there is none of them."""
        times = [
            tail.changed_at
            for tail in (self._events, self._metrics, self._log)
            if tail.changed_at is not None
        ]
        return max(0.0, self.now - max(times)) if times else None

    @property
    def has_events(self) -> bool:
        """Whether there are events to tell what is going on now."""
        return self._events.changed_at is not None

    @property
    def passes_over_events(self) -> bool:
        """Whether the events were too many to be read from the first on, so that what is counted may be too low."""
        return self._events.passed_over

    @property
    def run_clock(self) -> float:
        """Now on the run's own clock, seconds from its process's begin."""
        wall, latest_event = self.activity.wall_clock, self.activity.latest
        if wall is not None:
            return max(latest_event, self.now - wall)
        return latest_event + max(0.0, self.now - (self._events.changed_at or self.now))

    @property
    def steps(self) -> list[dict[str, float]]:
        """Rows of steps, without those of evaluations alone."""
        return [row for row in self.rows if row["step"] > 0 and "perf/step_time" in row]

    @property
    def done_steps(self) -> int:
        """The last step that is done."""
        last = int(self.rows[-1]["step"]) if self.rows else 0
        told = self.summary.get("steps", 0)
        return last if self.is_going_on or not isinstance(told, int) else max(last, told)

    @property
    def is_going_on(self) -> bool:
        """Whether a process runs it, as far as can be seen."""
        return self.status in ("starting", "running")

    @property
    def eta_s(self) -> float | None:
        """Seconds that its steps will take that are left, if they take as long as the last ones; None where nobody can know."""
        if self.plan.num_steps is None or not self.steps or not self.is_going_on:
            return None
        last = self.steps[-_STEPS_OF_ESTIMATE:]
        names = ("perf/step_time", "perf/eval_time", "perf/save_time")
        mean = sum(row.get(name, 0.0) for row in last for name in names) / len(last)
        left = (self.plan.num_steps - self.done_steps) * mean
        since = self.now - (self._metrics.changed_at or self.now)
        return max(0.0, left - min(max(0.0, since), mean))


def _step_plan(config: Mapping[str, Mapping[str, Any]]) -> StepPlan:
    """Return what the settings say; text (`none`) where a number is wanted stands for nothing."""

    def number(table: str, name: str) -> int | None:
        value = config.get(table, {}).get(name)
        return value if isinstance(value, int) else None

    evaluation, saving = config.get("eval", {}), config.get("checkpoint", {})
    interval = number("eval", "eval_interval")
    return StepPlan(
        num_steps=number("run", "num_rollout"),
        n_samples_per_prompt=number("rollout", "n_samples_per_prompt") or 1,
        eval_interval=interval,
        evals_before=interval is not None and not evaluation.get("skip_eval_before_train", False),
        save_interval=number("checkpoint", "save_interval"),
        saves_last=bool(saving.get("save_last", True)),
    )


def _is_number(value: object) -> bool:
    """Whether it is one that a float can be."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _HUGE)


def _read_json(path: Path) -> tuple[dict[str, Any], float]:
    """Return what a small JSON file holds, and when it was written; nothing where there is none, or it is no JSON."""
    try:
        return json_object(read_file(path), with_nan=True), path.stat().st_mtime
    except (OSError, Unreadable):
        return {}, 0.0
