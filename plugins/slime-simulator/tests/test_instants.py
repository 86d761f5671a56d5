"""When what the dispatcher does not decide happened, from events worked by hand."""

from __future__ import annotations

import pytest
from slime_simulator.replay.recording import FINISHED, TRAINED, WANTED, _attempts, _instants


def moment(name, at, **more):
    return {"name": name, "lane": "dispatcher", "at": at, **more}


def submitted(group, at):
    return moment("group_submitted", at, number=group, group=group, version=0)


def finished(group, at):
    return moment("group_finished", at, number=group, group=group)


def keys(moments):
    return [instant.keys for instant in _instants(moments)]


def end(group, attempt=0):
    return FINISHED, group, attempt


def test_groups_that_end_behind_one_another_end_at_once():
    """Which the loop saw together: the step was filled after both."""
    filled = moment("step_filled", 2.2, step=1, numbers=[1, 0])
    moments = [submitted(0, 1.0), submitted(1, 1.0), finished(1, 2.0), finished(0, 2.1), filled]
    assert keys(moments) == [[end(1), end(0)]]


def test_what_the_loop_did_between_them_keeps_them_apart():
    filled = moment("step_filled", 2.05, step=1, numbers=[1])
    moments = [submitted(0, 1.0), submitted(1, 1.0), finished(1, 2.0), filled, finished(0, 2.1)]
    assert keys(moments) == [[end(1)], [end(0)]]


def test_a_group_that_was_submitted_because_another_ended_ends_after_it():
    moments = [submitted(0, 1.0), finished(0, 2.0), submitted(1, 2.0), finished(1, 2.5)]
    assert keys(moments) == [[end(0)], [end(1)]]


def test_the_last_of_many_end_at_once_with_one_that_was_submitted_between_the_first():
    """The step was filled after 2 and 3, which the loop may have had without 3; that it was not before, is in no doubt."""
    filled = moment("step_filled", 3.1, step=1, numbers=[0, 2])
    moments = [submitted(group, 1.0) for group in (0, 1, 2)]
    moments += [
        finished(0, 2.0),
        submitted(3, 2.0),
        finished(1, 2.5),
        finished(2, 3.0),
        finished(3, 3.0),
        filled,
    ]
    assert keys(moments) == [[end(0)], [end(1), end(2), end(3)]]


def test_training_is_over_as_requests_are_interrupted_or_weights_arrive():
    """At 3.0 for step 1, whose weights came at 3.2, and at 4.0 for step 2; those of the begin, and those sent again, say nothing."""
    moments = [
        moment("weights_arrived", 0.5, version=0), moment("groups_wanted", 1.0, step=1), submitted(0, 1.0),
        moment("groups_interrupted", 3.0, numbers=[0]), submitted(0, 3.1), moment("weights_arrived", 3.2, version=1),
        moment("weights_arrived", 3.3, version=1), finished(0, 3.5), moment("weights_arrived", 4.0, version=2),
    ]  # fmt: skip
    instants = _instants(moments)
    assert [instant.keys for instant in instants] == [
        [(WANTED, 1, 0)], [(TRAINED, 1, 0)], [end(0, attempt=1)], [(TRAINED, 2, 0)],
    ]  # fmt: skip
    assert [instant.at for instant in instants] == pytest.approx([1.0, 3.0, 3.5, 4.0])


def test_instants_are_apart_where_they_were_recorded_as_one():
    filled = moment("step_filled", 2.0, step=1, numbers=[1])
    moments = [submitted(0, 1.0), submitted(1, 1.0), finished(1, 2.0), filled, finished(0, 2.0)]
    first, second = _instants(moments)
    assert second.at > first.at


def test_an_attempt_has_the_tokens_and_the_oldest_weights_of_its_requests():
    def request(begin, tokens, version):
        return {
            "name": "request", "lane": "engine", "begin": begin, "seconds": 0.1, "group": 0, "evaluation": False,
            "tokens": tokens, "weight_version": version,
        }  # fmt: skip

    found = _attempts(
        [
            submitted(0, 1.0), request(1.1, 0, "3"), request(1.2, 5, "3"), request(1.3, 2, "2"), submitted(0, 2.0),
            request(2.1, 9, "4"), finished(0, 2.3),
        ]
    )[0]  # fmt: skip
    assert [(one.tokens, one.version, one.is_finished) for one in found] == [(7, "2", False), (9, "4", True)]
