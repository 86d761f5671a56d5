"""Reading a trace by the rules of the Trace Event Format alone, as a viewer does; knows nothing of who wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import ContractError

#: (name, begin, end), in microseconds.
Slice = tuple[str, int, int]


def check_trace(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Slice]]:
    """Return the slices on each thread that has any, by the names of process and thread, both in the order of their numbers.

    Raises:
        ContractError: a slice begins or ends alone, overlaps another one without being within it, or comes before its
            parent; times are out of order; or a process or thread has no name, or several.
    """
    names: dict[tuple[str, int, int], str] = {}
    slices: dict[tuple[int, int], list[Slice]] = {}
    parents: dict[tuple[int, int], list[int]] = {}
    last = 0
    for event in events:
        pid, tid, ts = event["pid"], event["tid"], event["ts"]
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                key = event["name"], pid, tid
                _require(key not in names, f"{key} is named twice")
                names[key] = event["args"]["name"]
            continue
        _require(isinstance(ts, int) and ts >= last, f"{event['name']} at {ts} comes after {last}")
        last = ts
        _require(
            event["ph"] in ("X", "i"), f"{event['name']} is a {event['ph']}, which needs another one to match"
        )
        open_ends = parents.setdefault((pid, tid), [])
        if event["ph"] == "i":
            continue
        end = ts + event["dur"]
        _require(isinstance(end, int) and end >= ts, f"{event['name']} at {ts} ends at {end}")
        while open_ends and open_ends[-1] <= ts:
            open_ends.pop()
        _require(not open_ends or end <= open_ends[-1], f"{event['name']} at {ts} ends after what holds it")
        open_ends.append(end)
        slices.setdefault((pid, tid), []).append((event["name"], ts, end))
    for pid, tid in parents:
        _require(("process_name", pid, 0) in names, f"process {pid} has no name")
        _require(("thread_name", pid, tid) in names, f"thread {tid} of process {pid} has no name")
    tids = [tid for _, tid in parents]
    _require(len(set(tids)) == len(tids), f"threads of several processes share a number: {sorted(tids)}")
    return {
        (names["process_name", pid, 0], names["thread_name", pid, tid]): slices.get((pid, tid), [])
        for pid, tid in sorted(parents)
    }


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractError(otherwise)
