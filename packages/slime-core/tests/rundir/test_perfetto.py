"""Traces for Perfetto, drawn by hand: which span is on which thread, and the rules of the Trace Event Format."""

from __future__ import annotations

import pytest
from slime_core.rundir.perfetto import trace_events
from slime_core.testing.traces import check_trace


def header(wall_clock=1000.0, **more):
    return {"name": "header", "version": 1, "wall_clock": wall_clock, "pid": 7, "step": 1} | more


def span(name, begin, end, lane="loop", **more):
    return {"name": name, "lane": lane, "begin": begin, "seconds": end - begin, **more}


def drawn(*events):
    """Return process/thread -> (name, begin, end) of its spans, in microseconds."""
    return check_trace(list(trace_events(events)))


def test_requests_in_flight_get_threads_of_their_own_and_free_ones_are_used_again():
    found = drawn(
        header(),
        span("request", 2, 4, "engine 1"),
        span("request", 0, 10, "engine 0"),
        span("request", 1, 3, "engine 0"),
        span("request", 3, 4, "engine 0"),
        span("request", 2, 12, "engine 0"),
    )
    assert found["engine 1", "engine 1"] == [("request", 2_000_000, 4_000_000)]
    assert [
        [(b // 10**6, e // 10**6) for _, b, e in found["engine 0", f"engine 0 ({n})"]] for n in (1, 2, 3)
    ] == [
        [(0, 10)],
        [(1, 3), (3, 4)],
        [(2, 12)],
    ]


def test_phases_hold_one_another_and_what_overlaps_otherwise_is_moved():
    found = drawn(
        header(),
        span("batch", 1, 2),
        span("train", 2, 6),
        span("step", 0, 7),
        span("save", 6.5, 8),
        span("step", 8, 9),
        span("rollout", 0, 5, "rollout"),
    )
    assert [name for name, *_ in found["run", "loop (1)"]] == ["step", "batch", "train", "step"]
    assert [name for name, *_ in found["run", "loop (2)"]] == ["save"]
    assert [name for name, *_ in found["run", "rollout"]] == ["rollout"]


def test_processes_are_the_run_the_trainer_with_its_ranks_engines_by_number_and_rewards():
    lanes = ("rewards", "engine 10", "rank 1", "engine 2", "rank 0", "loop", "dispatcher")
    found = drawn(header(), *(span("reward" if lane == "rewards" else "x", 0, 1, lane) for lane in lanes))
    assert list(found) == [
        ("run", "loop"), ("run", "dispatcher"), ("trainer", "rank 0"), ("trainer", "rank 1"),
        ("engine 2", "engine 2"), ("engine 10", "engine 10"), ("rewards", "rewards"),
    ]  # fmt: skip


@pytest.mark.parametrize(("second", "begin"), [(1010.0, 10_000_000), (990.0, 4_000_000)])
def test_a_resumed_process_follows_by_the_wall_clock_or_if_that_was_set_back_at_once(second, begin):
    found = drawn(header(), span("step", 1, 4), header(second, step=2), span("step", 0, 1))
    assert [b for _, b, _ in found["run", "loop"]] == [1_000_000, begin]


def test_a_span_has_what_was_told_of_it_and_a_moment_no_length():
    told = span("request", 0, 1, "engine", sample=3)
    moment = {"name": "group_kept", "lane": "dispatcher", "at": 0.5, "number": 2}
    events = [event for event in trace_events([header(), told, moment]) if event["ph"] != "M"]
    assert [(event["ph"], event["name"], event["ts"], event["args"]) for event in events] == [
        ("X", "request", 0, {"sample": 3}),
        ("i", "process begins", 0, {"pid": 7, "step": 1}),
        ("i", "group_kept", 500_000, {"number": 2}),
    ]
