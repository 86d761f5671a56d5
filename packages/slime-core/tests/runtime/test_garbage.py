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
    gc.freeze()
    frozen = gc.get_freeze_count()
    collect_as_usual()
    assert gc.get_freeze_count() == frozen > 1000
