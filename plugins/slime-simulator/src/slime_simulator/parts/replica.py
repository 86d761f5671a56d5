"""One replica of the simulated engine: decode steps are counted between arrivals and departures, and not taken one by one."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from slime_simulator.costs.costs import EngineCosts

#: Seconds by which a time may miss the end of a decode step and count as it.
_EPSILON = 1e-9


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """One request, from its arrival to its answer."""

    left: int
    """Tokens to generate; at least 1."""
    context: int
    """Tokens that it brings: prompt, and response so far."""
    answer: Callable[[SimulatedRequest, int, str], None]
    """Called with it, the tokens that were generated, and the finish reason: `stop` or `abort`."""
    prefill: int | None = None
    """Of these, those that are to be prefilled; None for all."""
    place: int = 0
    """Which of several requests with one answer it is."""
    began: int | None = None
    """Weight updates that the engine had had when it was admitted; None while it waits."""
    ends: int = 0
    """The decode step, counted over the replica's life, after which it is complete."""


@dataclass(eq=False)
class SimulatedReplica:
    """Decodes the running requests together, `EngineCosts.slots` at most, and admits others between two decode steps."""

    costs: EngineCosts
    """Of the present; see `change`."""
    busy_s: float = field(default=0.0, init=False)
    """Seconds in which a request was running."""
    tokens: int = field(default=0, init=False)
    """Tokens that it has generated."""
    steps: int = field(default=0, init=False)
    """Decode steps that it has taken."""
    updates: int = field(default=0, init=False)
    """Weight updates that the engine has had."""
    _running: list[tuple[int, int, SimulatedRequest]] = field(default_factory=list, init=False)
    """A heap, by the step that completes each."""
    _waiting: deque[SimulatedRequest] = field(default_factory=deque, init=False)
    _kv: int = field(default=0, init=False)
    """Tokens in the KV cache."""
    _since: float = field(default=0.0, init=False)
    """When the present decode step began, or will begin after prefill."""
    _due: int = field(default=0, init=False)
    """What `steps` will be when the timer fires."""
    _timer: asyncio.Handle | None = field(default=None, init=False)
    _is_admitting: bool = field(default=False, init=False)
    """Whether the timer fires at the end of the present decode step, to admit what waits."""
    _is_paused: bool = field(default=False, init=False)
    _began: float = field(default=0.0, init=False)
    _numbers: int = field(default=0, init=False)

    @property
    def pending(self) -> int:
        """Requests in flight or waiting."""
        return len(self._running) + len(self._waiting)

    def submit(self, request: SimulatedRequest) -> None:
        """Take a request. It is admitted at the end of the decode step, once a slot is free."""
        self._waiting.append(request)
        self._admit_soon()

    def abort(self) -> None:
        """Answer all requests with the tokens that they have."""
        self._catch_up()
        self._set_timer(None)
        self._stop_clock()
        for ends, _, request in self._running:
            left = ends - self.steps
            self._answer(request, request.left - left, "abort" if left else "stop")
        for request in self._waiting:
            self._answer(request, 0, "abort")
        self._running, self._kv = [], 0
        self._waiting.clear()

    def pause(self) -> None:
        """Stop within a decode step."""
        self._catch_up()
        self._set_timer(None)
        self._since -= asyncio.get_running_loop().time()  # how much of the step is done, negative
        self._is_paused = True

    def resume(self, *, recompute: bool) -> None:
        """Go on where `pause` stopped, with weights that arrived; with `recompute` after a prefill of all running requests."""
        self._since += asyncio.get_running_loop().time() + recompute * self.costs.prefill_token_s * self._kv
        self._is_paused = False
        self.updates += 1
        if self._running:
            self._schedule(self._running[0][0])
        self._admit_soon()

    def change(self, costs: EngineCosts) -> None:
        """Go on with other costs, as far within a decode step or a prefill as it is."""
        self._catch_up()
        step_s, prefill_s = self._seconds(1), self.costs.prefill_token_s
        self.costs = costs
        now = 0.0 if self._is_paused else asyncio.get_running_loop().time()
        ahead_s = self._since - now  # until the step begins
        if ahead_s > 0:
            self._since = now + (ahead_s * costs.prefill_token_s / prefill_s if prefill_s else ahead_s)
        else:
            self._since = now + ahead_s * self._seconds(1) / step_s
        if self._running and self._timer is not None:
            is_admitting = self._is_admitting
            self._schedule(self._due)
            self._is_admitting = is_admitting

    def settle(self) -> None:
        """Bring `busy_s` up to the present."""
        self._stop_clock()
        self._began = asyncio.get_running_loop().time()

    def _seconds(self, steps: int) -> float:
        """Return how long the next decode steps take, while no request comes or goes: the KV cache grows by each."""
        n, costs = len(self._running), self.costs
        first = costs.step_s + n * costs.request_s + self._kv * costs.kv_token_s
        return steps * first + n * costs.kv_token_s * steps * (steps - 1) / 2

    def _steps_within(self, seconds: float) -> int:
        """Return how many whole decode steps fit: the root of the quadratic that `_seconds` is."""
        seconds += _EPSILON
        if seconds <= 0:
            return 0
        n, costs = len(self._running), self.costs
        square = n * costs.kv_token_s / 2
        linear = costs.step_s + n * costs.request_s + self._kv * costs.kv_token_s - square
        root = math.sqrt(linear * linear + 4 * square * seconds)
        steps = int(2 * seconds / (linear + root))
        if self._seconds(steps + 1) <= seconds:
            return steps + 1
        return steps if self._seconds(steps) <= seconds else steps - 1

    def _advance(self, steps: int) -> None:
        """Take decode steps."""
        self._since += self._seconds(steps)
        self.steps += steps
        self._kv += steps * len(self._running)

    def _catch_up(self) -> None:
        """Take the decode steps that are over by now."""
        if self._running and not self._is_paused:
            elapsed = asyncio.get_running_loop().time() - self._since
            self._advance(min(self._steps_within(elapsed), self._running[0][0] - self.steps))

    def _admit_soon(self) -> None:
        """Have what waits admitted at the end of the present decode step, if there is a slot for it."""
        is_full = len(self._running) >= self.costs.slots
        if not self._waiting or is_full or self._is_admitting or self._is_paused:
            return
        if self._running:
            self._catch_up()
            self._schedule(min(self.steps + 1, self._running[0][0]))
        else:
            self._set_timer(asyncio.get_running_loop().call_soon(self._turn))
        self._is_admitting = True

    def _schedule(self, due: int) -> None:
        """Have the timer fire when `steps` will be `due`."""
        at = self._since + self._seconds(due - self.steps)
        self._set_timer(asyncio.get_running_loop().call_at(at, self._turn))
        self._due = due

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._is_admitting = timer, False

    def _turn(self) -> None:
        """Answer what is complete, and admit what waits, at the end of a decode step."""
        now = asyncio.get_running_loop().time()
        self._timer, self._is_admitting = None, False
        if self._running:
            self._advance(self._due - self.steps)
        else:
            self._began = now
        while self._running and self._running[0][0] == self.steps:
            _, _, request = heapq.heappop(self._running)
            self._kv -= request.context + request.left
            self._answer(request, request.left, "stop")
        prefill = context = 0
        while self._waiting and len(self._running) < self.costs.slots:
            request = self._waiting.popleft()
            request.began, request.ends = self.updates, self.steps + request.left
            self._numbers += 1
            heapq.heappush(self._running, (request.ends, self._numbers, request))
            context += request.context
            prefill += request.context if request.prefill is None else request.prefill
        self._kv += context
        self._since = now + prefill * self.costs.prefill_token_s
        if self._running:
            self._schedule(self._running[0][0])
        else:
            self.busy_s += now - self._began

    def _stop_clock(self) -> None:
        if self._running:
            self.busy_s += asyncio.get_running_loop().time() - self._began

    def _answer(self, request: SimulatedRequest, tokens: int, reason: str) -> None:
        self.tokens += tokens
        request.answer(request, tokens, reason)
