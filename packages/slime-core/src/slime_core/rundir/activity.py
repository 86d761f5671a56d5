"""`Activity`: what a run is doing now, from the lines of its `events.jsonl` as they come. docs/events.md has the schema."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slime_core.rundir.events import HEADER, LOOP

#: Phases of the loop that follow each other at once: what begins when one is over.
_NEXT = {
    "start_trainer": "start",
    "load": "start",
    "start_engine": "start",
    "start_rewards": "update_weights",
    "dump": "batch",
    "batch": "train",
    "train": "update_weights",
}
#: After these the loop evaluates, saves, or goes on with the next step.
_LAST = {"update_weights", "step", "eval", "save"}
#: Events that say nothing here: they are passed over before their JSON is read.
_SILENT = {
    b"reward",
    b"micro_batch",
    b"forward_backward",
    b"optimizer_update",
    b"optimizer_step",
    b"group_kept",
}
_BEGIN = b'{"name":"'
#: Seconds over which requests and tokens are averaged.
WINDOW_S = 30.0


@dataclass(frozen=True)
class CurrentPhase:
    """What the run is at, of which step, and since when on the run's clock."""

    name: str
    step: int
    since: float


@dataclass(frozen=True)
class StepPlan:
    """What the settings of a run say about its steps."""

    num_steps: int | None = None
    """None where only the data says it."""
    n_samples_per_prompt: int = 1
    eval_interval: int | None = None
    evals_before: bool = False
    """Whether it is evaluated before the first step."""
    save_interval: int | None = None
    saves_last: bool = True

    def after(self, step: int, done: set[str]) -> str | None:
        """Return what comes after a step before the next one, of `eval` and `save`, that is not done yet."""
        is_last = step == self.num_steps
        evals = _due(step, self.eval_interval, is_last=is_last) if step else self.evals_before
        saves = step > 0 and (_due(step, self.save_interval, is_last=False) or (is_last and self.saves_last))
        wanted = [name for name, is_due in (("eval", evals), ("save", saves)) if is_due]
        return next((name for name in wanted if name not in done), None)


def _due(step: int, interval: int | None, *, is_last: bool) -> bool:
    return interval is not None and (is_last or step % interval == 0)


class Activity:
    """What the newest process of a run is doing, as far as its events tell it.

    An event is written when what it tells is over, so phases in progress are concluded from those before them.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.n_unreadable = 0
        """Lines that are no events."""
        self._reset()

    def _reset(self) -> None:
        self.wall_clock: float | None = None
        """Unix seconds of the process's time 0; None where its header was not read."""
        self.latest = 0.0
        """The latest time that an event tells, on the run's clock."""
        self.phase: CurrentPhase | None = None
        """What the loop is at, but for waiting for groups."""
        self.rollout: CurrentPhase | None = None
        """The rollout in progress."""
        self.in_flight: dict[int, int] = {}
        """Groups whose requests have begun and are not over: number -> group."""
        self.finished: set[int] = set()
        """Numbers of groups that wait to be trained on."""
        self._answered: Counter[int] = Counter()
        self._done_after: set[str] = set()
        self._step = 0
        self._requests: deque[tuple[float, int]] = deque()

    @property
    def requests_in_flight(self) -> int:
        """Responses of groups in flight that are not there yet; with several turns a response, at least as many."""
        n = self._plan.n_samples_per_prompt
        return sum(max(0, n - self._answered[group]) for group in self.in_flight.values())

    def rates(self, now: float) -> tuple[float, float]:
        """Return (requests, tokens) a second that were answered in the last `WINDOW_S` seconds before `now`."""
        while self._requests and self._requests[0][0] < now - WINDOW_S:
            self._requests.popleft()
        span = max(1.0, min(WINDOW_S, now))
        return len(self._requests) / span, sum(tokens for _, tokens in self._requests) / span

    def forget(self) -> None:
        """Begin anew: the file was replaced."""
        self._reset()

    def take(self, lines: Iterable[bytes]) -> None:
        """Take down what lines of the file say; those that are no events are counted."""
        for line in lines:
            if line.startswith(_BEGIN) and line[len(_BEGIN) : line.find(b'"', len(_BEGIN))] in _SILENT:
                continue
            try:
                event = json.loads(line)
                self._take(event["name"], event)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                self.n_unreadable += 1

    def _take(self, name: str, event: dict[str, Any]) -> None:
        if name == HEADER:
            self._reset()
            self.wall_clock, self._step = float(event["wall_clock"]), int(event["step"]) - 1
            self.phase = CurrentPhase("start", self._step, 0.0)
            return
        end = float(event["at"] if "at" in event else event["begin"] + event["seconds"])
        self.latest = max(self.latest, end)
        if name == "request":
            self._answer(event, end)
        elif "at" in event:
            self._decide(name, event, end)
        elif name == "rollout":
            self.rollout = None
        elif event["lane"] == LOOP:
            self._end(name, int(event["step"]), end)

    def _answer(self, event: dict[str, Any], end: float) -> None:
        self._requests.append((end, int(event.get("tokens") or 0)))
        if event.get("evaluation"):
            if self.phase is None or self.phase.name != "eval":
                self.phase = CurrentPhase("eval", self._step, float(event["begin"]))
        else:
            self._answered[event["group"]] += 1

    def _decide(self, name: str, event: dict[str, Any], at: float) -> None:
        number = event.get("number")
        if name == "groups_wanted":
            self.rollout = CurrentPhase("rollout", int(event["step"]), at)
        elif name == "group_submitted" or (name == "group_restored" and not event["finished"]):
            self.in_flight[int(event["number"])] = int(event["group"])
            self._answered.pop(event["group"], None)
        elif name in ("group_finished", "group_restored"):
            self._leave([int(event["number"])])
            self.finished.add(int(event["number"]))
        elif name in ("group_failed", "group_dropped") and number is not None:
            self._leave([int(number)])
            self.finished.discard(int(number))
        elif name in ("step_filled", "groups_put_back"):
            self._leave(event["numbers"])
            self.finished.difference_update(event["numbers"])

    def _leave(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            group = self.in_flight.pop(number, None)
            if group is not None:
                self._answered.pop(group, None)

    def _end(self, name: str, step: int, end: float) -> None:
        """Conclude from a phase that is over what the loop is at."""
        if name in _NEXT:
            self.phase = CurrentPhase(_NEXT[name], step, end)
        elif name in _LAST:
            if name == "step" or step != self._step:
                self._step, self._done_after = step, set()
            self._done_after.add(name)
            waits_for_end = name == "update_weights" and step > 0 and self.phase is not None
            following = None if waits_for_end else self._plan.after(step, self._done_after)
            self.phase = None if following is None else CurrentPhase(following, step, end)
