"""What a run keeps from collections, and what it leaves as it was."""

from __future__ import annotations

import gc

import pytest
from slime_core.runtime.garbage import collect_as_usual, spare_the_collector


@pytest.fixture(autouse=True)
def as_before(usual_collector):
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_after_a_run_all_is_as_it_was():
    before = gc.get_threshold()
    spare_the_collector()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[2] > 10 * before[2]
    collect_as_usual()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_a_run_that_had_not_begun_leaves_what_its_caller_froze():
    """By an object of its own: how many are frozen falls when another thread lets go of one."""
    probe = ["frozen by the caller"]
    assert is_looked_at(probe)
    gc.freeze()
    collect_as_usual()
    assert not is_looked_at(probe)
    gc.unfreeze()
    assert is_looked_at(probe)


def is_looked_at(wanted: object) -> bool:
    """Whether collections look at an object: not at one that is frozen."""
    return any(found is wanted for found in gc.get_objects())
