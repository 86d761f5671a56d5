"""What a run is at, concluded from the events before; each by hand, in the order in which a run writes them."""

from __future__ import annotations

import json

import pytest
from slime_core.rundir.activity import Activity, CurrentPhase, StepPlan

SCHEDULE = StepPlan(num_steps=4, n_samples_per_prompt=2, eval_interval=2, evals_before=True, save_interval=3)
HEADER = {"name": "header", "version": 1, "wall_clock": 5000.0, "pid": 3, "step": 1}


@pytest.fixture
def activity():
    return Activity(SCHEDULE)


def tell(activity, *events):
    activity.take([json.dumps(event, separators=(",", ":")).encode() for event in events])


def span(name, begin, end, step, lane="loop"):
    return {"name": name, "lane": lane, "begin": begin, "seconds": end - begin, "step": step}


def moment(name, at, **more):
    return {"name": name, "lane": "dispatcher", "at": at, **more}


def request(group, begin, end, *, tokens=5, evaluation=False):
    return {
        "name": "request", "lane": "engine", "begin": begin, "seconds": end - begin, "group": group, "tokens": tokens,
        "evaluation": evaluation,
    }  # fmt: skip


def test_phases_of_the_first_steps_follow_each_other(activity):
    assert activity.phase is None
    tell(activity, HEADER)
    assert (activity.phase, activity.wall_clock) == (CurrentPhase("start", 0, 0.0), 5000.0)
    tell(activity, span("start_engine", 0, 1, 0), span("start_rewards", 1, 2, 0))
    assert activity.phase == CurrentPhase("update_weights", 0, 2)
    tell(activity, span("update_weights", 2, 3, 0))
    assert activity.phase == CurrentPhase("eval", 0, 3)
    tell(activity, span("eval", 3, 4, 0))
    assert activity.phase is None
    tell(activity, moment("groups_wanted", 4.5, step=1))
    assert activity.rollout == CurrentPhase("rollout", 1, 4.5)
    tell(activity, span("rollout", 4.5, 6, 1, lane="rollout"), span("dump", 6, 7, 1))
    assert (activity.rollout, activity.phase) == (None, CurrentPhase("batch", 1, 7))
    tell(activity, span("batch", 7, 8, 1))
    assert activity.phase == CurrentPhase("train", 1, 8)
    tell(activity, span("train", 8, 12, 1))
    assert activity.phase == CurrentPhase("update_weights", 1, 12)
    tell(activity, span("update_weights", 12, 13, 1), span("step", 4.5, 13, 1))
    assert activity.phase is None  # neither evaluated nor saved after step 1


def after_step(activity, step):
    tell(
        activity,
        HEADER,
        span("train", 1, 2, step),
        span("update_weights", 2, 3, step),
        span("step", 0, 3, step),
    )
    return activity.phase


def test_after_a_step_it_is_evaluated_and_saved_when_it_is_time(activity):
    assert after_step(activity, 1) is None
    assert after_step(activity, 2) == CurrentPhase("eval", 2, 3)
    tell(activity, span("eval", 3, 5, 2))
    assert activity.phase is None
    assert after_step(activity, 3) == CurrentPhase("save", 3, 3)
    tell(activity, span("save", 3, 5, 3))
    assert activity.phase is None
    assert after_step(activity, 4) == CurrentPhase("eval", 4, 3)  # the last one
    tell(activity, span("eval", 3, 5, 4))
    assert activity.phase == CurrentPhase("save", 4, 5)


def test_groups_are_in_flight_until_they_are_finished_and_wait_until_they_are_trained_on(activity):
    tell(activity, HEADER)
    tell(activity, *(moment("group_submitted", 1, number=n, group=10 + n, version=0) for n in range(4)))
    assert (activity.in_flight, activity.requests_in_flight) == ({0: 10, 1: 11, 2: 12, 3: 13}, 8)
    tell(activity, request(10, 1, 2), request(11, 1, 2), request(99, 1, 2, evaluation=True))
    assert activity.requests_in_flight == 6
    tell(activity, request(10, 1, 3), moment("group_finished", 3, number=0, group=10))
    assert (activity.in_flight, activity.finished, activity.requests_in_flight) == (
        {1: 11, 2: 12, 3: 13},
        {0},
        5,
    )
    tell(activity, moment("group_dropped", 3, number=0, group=10, reason="zero", step=1))
    tell(
        activity,
        moment("group_finished", 4, number=1, group=11),
        moment("group_finished", 4, number=2, group=12),
    )
    assert (activity.in_flight, activity.finished) == ({3: 13}, {1, 2})
    tell(activity, moment("step_filled", 5, step=1, numbers=[2]), moment("groups_put_back", 5, numbers=[3]))
    assert (activity.in_flight, activity.finished, activity.requests_in_flight) == ({}, {1}, 0)


def test_a_group_that_is_sent_again_has_all_its_requests_to_come(activity):
    tell(activity, HEADER, moment("group_submitted", 1, number=0, group=7, version=0), request(7, 1, 2))
    assert activity.requests_in_flight == 1
    tell(activity, moment("group_submitted", 3, number=0, group=7, version=1))
    assert activity.requests_in_flight == 2


def test_restored_groups_are_in_flight_or_wait(activity):
    tell(
        activity,
        HEADER,
        moment("group_restored", 0, number=0, group=3, version=1, finished=True),
        moment("group_restored", 0, number=1, group=4, version=1, finished=False),
    )
    assert (activity.in_flight, activity.finished) == ({1: 4}, {0})


def test_rates_are_of_the_last_thirty_seconds_and_of_less_at_the_begin(activity):
    tell(activity, HEADER, *(request(0, end - 1, end, tokens=10) for end in (2, 4)))
    assert activity.rates(4.0) == (0.5, 5.0)
    tell(activity, *(request(0, 30, 40, tokens=30) for _ in range(60)))
    assert activity.rates(50.0) == (2.0, 60.0)
    assert activity.rates(71.0) == (0.0, 0.0)


def test_another_process_of_the_run_begins_with_nothing_in_flight(activity):
    tell(activity, HEADER, moment("group_submitted", 1, number=0, group=7, version=0))
    tell(activity, HEADER | {"wall_clock": 6000.0, "step": 3})
    assert (activity.in_flight, activity.phase, activity.wall_clock) == (
        {},
        CurrentPhase("start", 2, 0.0),
        6000.0,
    )


def test_requests_of_an_evaluation_say_that_it_goes_on(activity):
    """Also where the settings say nothing of it."""
    tell(activity, HEADER, span("train", 1, 2, 1), span("step", 0, 3, 1), request(1, 4, 5, evaluation=True))
    assert activity.phase == CurrentPhase("eval", 1, 4)


def test_lines_that_are_no_events_are_counted_and_left_out(activity):
    tell(activity, HEADER)
    activity.take(
        [b"", b"{", b"[]", b"null", b'{"name":"step"}', b'{"name":"request","at":"x"}', b"\xff\xfe"]
    )
    assert activity.n_unreadable == 7
    assert activity.phase == CurrentPhase("start", 0, 0.0)
    activity.take([b'{"name":"reward" and no JSON is read of it'])
    assert activity.n_unreadable == 7
