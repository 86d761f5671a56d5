"""Concurrency: how many requests of a run are in flight at the engine at once, a fixed number or one that follows its load."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, cast

from slime_core.errors import SlimeError
from slime_core.protocols import EngineLoad, Metrics, ReportsLoad, RolloutEngine
from slime_core.rundir.events import DISPATCHER, EventLog
from slime_core.runtime.clock import now

logger = logging.getLogger(__name__)

#: Seconds between two readings of the engine's load.
INTERVAL_S = 1.0
#: The limit that `auto` begins with, for each server.
START = 32
#: Usage of the KV cache that growth does not go beyond, and usage from which the limit is trimmed.
ROOM, FULL = 0.85, 0.95
#: What one decrease leaves of the limit, at least.
CUT = 0.75
#: Share of the limit, as the last decrease left it, by which it then grows in a round.
STEP = 1 / 16
#: Requests that queue for each one that runs, up to which the queue is short.
ARRIVING = 1 / 16


class AdaptiveLimit:
    """A limit by additive increase and multiplicative decrease (AIMD), from the loads that an engine reports.

    A *round* is as many answers as the limit: by then the requests that it let in have grown to their full length, so that
    the KV cache shows what the limit does.

    - Grow: once a round, if requests waited at the limit. It doubles until there was a first decrease, and grows by `STEP`
      from then on, in both cases not beyond what fills `ROOM` of the KV cache at the present usage of a request.
    - Trim: at `FULL` or more, to as many as would fill `FULL`.
    - Cut: to `CUT` of it, if the engine has retracted a request since the last reading. If its queue was not short at two
      readings in turn, and no more are running than before, by those that queue, at most to `CUT` of it.

    A queue is short if it holds no more than were answered since the last reading: who comes waits for less than that time.
    Where responses are of a few tokens many have always just come. An engine that runs none is paused, and its queue says
    nothing.

    After a decrease nothing is decided for as many answers as `CUT` takes away: before, it cannot have taken effect.

    Source: Chiu and Jain 1989, and slow start as in RFC 5681, section 3.1, where a round is a round trip.
    """

    def __init__(self) -> None:
        self.limit = START
        self._step: int | None = None
        """What it grows by; None while it doubles."""
        self._before: EngineLoad | None = None
        self._seen = 0
        """Answers before the last reading."""
        self._was_short = True
        self._since = 0
        """Answers before the last change."""
        self._owed = 0
        """Answers after it before the next."""

    def follow(self, load: EngineLoad, *, answers: int, waited: bool) -> str | None:
        """Take a reading; returns why the limit has changed, None if it has not.

        Args:
            load: of the engine.
            answers: requests that were answered in all, without those that were aborted.
            waited: whether requests waited at the limit since the last reading.
        """
        before, self._before = self._before, load
        recent, self._seen = answers - self._seen, answers
        is_short = load.queued <= max(ARRIVING * load.running, recent)
        was_short, self._was_short = self._was_short, is_short
        if before is None:
            return self._change(START * load.replicas, "start", answers)
        if answers - self._since < self._owed:
            return None
        is_stuck = not (is_short or was_short) and 0 < load.running <= before.running
        if load.retractions > before.retractions:
            return self._decrease(0, "retracted", answers)
        if is_stuck:
            return self._decrease(self.limit - load.queued, "queued", answers)
        if load.kv_cache_usage >= FULL:
            return self._decrease(int(self.limit * FULL / load.kv_cache_usage), "full", answers)
        if waited and is_short and answers - self._since >= self.limit:
            return self._increase(load.kv_cache_usage, answers)
        return None

    def _decrease(self, wanted: int, why: str, answers: int) -> str | None:
        limit = max(1, int(self.limit * CUT), wanted)
        self._step = max(1, int(limit * STEP))
        return self._change(limit, why, answers)

    def _increase(self, usage: float, answers: int) -> str | None:
        limit = self.limit + (self.limit if self._step is None else self._step)
        if usage > 0:
            limit = max(self.limit, min(limit, int(self.limit * ROOM / usage)))
        return self._change(limit, "room", answers)

    def _change(self, limit: int, why: str, answers: int) -> str | None:
        if limit == self.limit:
            return None
        self._since = answers
        self._owed = int(self.limit * (1 - CUT)) if limit < self.limit else 0
        self.limit = limit
        return why


class ConcurrencyLimit:
    """Lets requests through to the engine, so many at once, in the order in which they came.

    Every request of a run passes it, those of evaluations too: it is the engine's room that it keeps. A generator that is
    inside a tool call has no request, and takes none of it. Where there is a limit and the engine reports its load, that is
    read once a second while requests are in flight. Belongs to one event loop.

    Args:
        limit: most requests in flight; `auto` follows the engine's load, None is any number.
        engine: whose load is read.
        events: of the run, which are told when the limit changes.
    """

    def __init__(self, limit: int | Literal["auto"] | None, engine: RolloutEngine, events: EventLog) -> None:
        self._adaptive = AdaptiveLimit() if limit == "auto" else None
        self.limit = self._adaptive.limit if self._adaptive is not None else cast("int | None", limit)
        """Most requests in flight; None is any number."""
        self.in_flight = 0
        """Requests that were let through, and are not answered."""
        self.when_none_waits: Callable[[], None] = lambda: None
        """Called when the last request that waited was let through or turned away."""
        self._engine, self._events = engine, events
        self._waiting: OrderedDict[asyncio.Future[bool], object] = OrderedDict()
        self._answers, self._waited = 0, False
        self._watch: asyncio.Task[None] | None = None
        self._next_reading = 0.0
        self._fault: BaseException | None = None
        self._was_warned = False
        self._newest: EngineLoad | None = None
        self._metrics: Metrics = {}
        self._retractions = 0

    @property
    def holds_back(self) -> bool:
        """Whether requests wait: further ones would gain nothing by being made now."""
        return bool(self._waiting)

    async def enter(self, owner: object) -> bool:
        """Wait until a request may be sent, and count it as in flight; False if its owner was turned away meanwhile.

        Raises:
            EngineError: the engine's load could not be made sense of.
        """
        if self._fault is not None:
            raise self._fault
        if not self._waiting and self._has_room():
            self._let_in()
            return True
        ticket: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = owner
        self._waited = True
        self._note("rollout/requests_waiting", len(self._waiting))
        try:
            return await ticket
        except asyncio.CancelledError:
            if self._waiting.pop(ticket, None) is not None:
                self._tell_if_none_waits()
            elif _lets_in(ticket):
                self.leave(answered=False)
            raise

    def leave(self, *, answered: bool) -> None:
        """Say that a request is over, and whether it has its whole answer; the next one is let through."""
        self.in_flight -= 1
        self._answers += answered
        self._admit()
        if not self.in_flight and self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def turn_away(self, owner: object) -> None:
        """Have `enter` return False to all that wait for an owner."""
        for ticket in [ticket for ticket, whose in self._waiting.items() if whose is owner]:
            del self._waiting[ticket]
            if not ticket.done():  # otherwise it is cancelled, and about to say so
                ticket.set_result(False)
            self._tell_if_none_waits()

    def take_metrics(self) -> Metrics:
        """Return the limit, and what was seen since the last call; nothing without a limit."""
        metrics, self._metrics = self._metrics, {}
        if self.limit is None:
            return {}
        if self._newest is not None:
            metrics["engine/retractions"] = float(self._newest.retractions - self._retractions)
            self._retractions = self._newest.retractions
        return metrics | {"rollout/concurrency": float(self.limit)}

    def _has_room(self) -> bool:
        return self.limit is None or self.in_flight < self.limit

    def _admit(self) -> None:
        while self._waiting and self._has_room():
            ticket, _ = self._waiting.popitem(last=False)
            if not ticket.done():  # otherwise it is cancelled, and about to say so
                self._let_in()
                ticket.set_result(True)
            self._tell_if_none_waits()

    def _tell_if_none_waits(self) -> None:
        if not self._waiting:
            self.when_none_waits()

    def _let_in(self) -> None:
        self.in_flight += 1
        self._note("rollout/requests_in_flight", self.in_flight)
        if self._watch is None and self.limit is not None and self._engine.capabilities.reports_load:
            self._watch = asyncio.create_task(self._read_loads(), name="load of the engine")
            self._watch.add_done_callback(self._stopped)

    def _note(self, name: str, value: float) -> None:
        """Remember the largest value of a metric, if there is a limit."""
        if self.limit is None:
            return
        self._metrics[name] = max(self._metrics.get(name, 0.0), float(value))

    async def _read_loads(self) -> None:
        engine = cast(ReportsLoad, self._engine)
        while True:
            await asyncio.sleep(self._next_reading - now())
            self._next_reading = now() + INTERVAL_S
            try:
                load = await engine.current_load()
            except SlimeError as error:  # if the engine is lost, its requests say so
                if not self._was_warned:
                    logger.warning("the engine does not tell its load, so the limit stays: %s", error)
                self._was_warned = True
            else:
                self._take(load)

    def _take(self, load: EngineLoad) -> None:
        self._newest = load
        self._note("engine/kv_cache_usage", load.kv_cache_usage)
        self._note("engine/requests_queued", load.queued)
        if self._adaptive is None:
            return
        before, waited, self._waited = self.limit, self._waited, bool(self._waiting)
        why = self._adaptive.follow(load, answers=self._answers, waited=waited)
        if why is not None:
            self.limit = self._adaptive.limit
            self._events.moment(
                "concurrency_changed",
                lane=DISPATCHER,
                limit=self.limit,
                before=before,
                reason=why,
                kv_cache_usage=load.kv_cache_usage,
                running=load.running,
                queued=load.queued,
                retractions=load.retractions,
            )
            self._admit()

    def _stopped(self, watch: asyncio.Task[None]) -> None:
        """Fail all requests if the engine's load made the reading fail: a plugin's fault must not pass for no load."""
        if watch.cancelled() or (fault := watch.exception()) is None:
            return
        fault.add_note("raised while the engine's load was read")
        self._fault = fault
        while self._waiting:
            ticket, _ = self._waiting.popitem(last=False)
            if not ticket.done():
                ticket.set_exception(fault)


def _lets_in(ticket: asyncio.Future[bool]) -> bool:
    """Return whether a ticket was answered, and with a place."""
    return ticket.done() and not ticket.cancelled() and ticket.exception() is None and ticket.result()
