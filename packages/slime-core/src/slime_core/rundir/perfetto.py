"""The events of a run as a trace for Perfetto, in the Trace Event Format (JSON) that it imports.

Source: the Trace Event Format of Chromium's trace viewer: complete events (`X`), instants (`i`) and metadata (`M`), in
microseconds. On one thread of it spans may hold one another, but not overlap otherwise, and whoever holds comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_core.rundir.events import DISPATCHER, HEADER, LOOP, RANK, REWARDS, ROLLOUT

#: Lanes that are threads of the process `run`, in this order.
_OF_RUN = (LOOP, ROLLOUT, DISPATCHER)
#: Events that may overlap within one lane: each gets a thread that is free.
_BESIDE_EACH_OTHER = ("request", "reward")
#: Numbers of threads are of no process: a thread with its process's number would be its main one.
_FIRST_THREAD = 1001
#: Its name, and whether it is of spans that are beside each other.
_Lane = tuple[str, bool]
_PLACE = frozenset({"name", "lane", "begin", "seconds", "at"})


@dataclass(order=True)
class _Shown:
    """A span, or a moment as one of no length, in whole microseconds from the first process of the run."""

    begin: int
    minus_length: int
    number: int
    event: Mapping[str, Any] = field(compare=False)

    @property
    def end(self) -> int:
        return self.begin - self.minus_length


def trace_events(events: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a run's events, the names of processes and threads first.

    Processes of one run follow each other by their wall clocks; where a clock was set back, without a gap.

    Args:
        events: as `read_events` yields them.
    """
    lanes: dict[_Lane, list[_Shown]] = {}
    for shown in _on_one_clock(events):
        lane = shown.event["lane"], shown.event["name"] in _BESIDE_EACH_OTHER
        lanes.setdefault(lane, []).append(shown)
    pids: dict[str, int] = {}
    placed: list[tuple[_Shown, int, int]] = []
    first_tid = _FIRST_THREAD
    for lane in sorted(lanes, key=_order):
        name, are_beside = lane
        process = "run" if name in _OF_RUN else "trainer" if name.startswith(RANK) else name
        if process not in pids:
            pids[process] = pid = len(pids) + 1
            yield from _named("process", pid, 0, process, place=pid)
        pid, spans = pids[process], sorted(lanes[lane])
        threads = list(_beside(spans) if are_beside else _within(spans))
        placed += [(span, pid, first_tid + thread) for span, thread in zip(spans, threads, strict=True)]
        n_threads = 1 + max(threads)
        for thread in range(n_threads):
            tid, numbered = first_tid + thread, name if n_threads == 1 else f"{name} ({thread + 1})"
            yield from _named("thread", pid, tid, numbered, place=tid)
        first_tid += n_threads
    for shown, pid, tid in sorted(placed):
        yield _trace_event(shown, pid, tid)


def _on_one_clock(events: Iterable[Mapping[str, Any]]) -> Iterator[_Shown]:
    zero: float | None = None
    offset = last = 0
    for number, event in enumerate(events):
        if event["name"] == HEADER:
            zero = event["wall_clock"] if zero is None else zero
            offset = max(last, _microseconds(event["wall_clock"] - zero))
            begun = {"name": "process begins", "lane": LOOP, **{key: event[key] for key in ("pid", "step")}}
            yield _Shown(offset, 0, number, begun)
            continue
        begin = event["begin"] if "begin" in event else event["at"]
        shown_begin, end = _microseconds(begin), _microseconds(begin + event.get("seconds", 0.0))
        last = max(last, offset + end)
        yield _Shown(offset + shown_begin, shown_begin - end, number, event)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _order(of: _Lane) -> tuple[int, int, str, bool]:
    """Return where a lane stands: the run, ranks and engines by their numbers, rewards."""
    lane, are_beside = of
    if lane in _OF_RUN:
        return 0, _OF_RUN.index(lane), lane, are_beside
    digits = lane.rpartition(" ")[2]
    number = int(digits) if digits.isdecimal() and len(digits) < 10 else -1
    return (1 if lane.startswith(RANK) else 3 if lane == REWARDS else 2), number, lane, are_beside


def _beside(spans: Iterable[_Shown]) -> Iterator[int]:
    """Yield the number of a thread for each span, in the order of their begins: the first on which nothing is open."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for span in spans:
        while busy and busy[0][0] <= span.begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        number = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end, number))
        yield number


def _within(spans: Iterable[_Shown]) -> Iterator[int]:
    """Yield the number of a thread for each span: the first on which all that is open holds it whole."""
    threads: list[list[int]] = []
    for span in spans:
        for ends in threads:
            while ends and ends[-1] <= span.begin:
                ends.pop()
        fits = (number for number, ends in enumerate(threads) if not ends or span.end <= ends[-1])
        number = next(fits, len(threads))
        if number == len(threads):
            threads.append([])
        threads[number].append(span.end)
        yield number


def _trace_event(shown: _Shown, pid: int, tid: int) -> dict[str, Any]:
    event = shown.event
    of = {key: value for key, value in event.items() if key not in _PLACE}
    where = {"name": event["name"], "pid": pid, "tid": tid, "ts": shown.begin, "args": of}
    if "begin" in event:
        return {"ph": "X", "dur": -shown.minus_length} | where
    return {"ph": "i", "s": "t"} | where


def _named(kind: str, pid: int, tid: int, name: str, *, place: int) -> Iterator[dict[str, Any]]:
    """Yield what names a process or thread, and puts it in its place."""
    given: tuple[tuple[str, dict[str, str | int]], ...] = (
        (f"{kind}_name", {"name": name}),
        (f"{kind}_sort_index", {"sort_index": place}),
    )
    for what, args in given:
        yield {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
