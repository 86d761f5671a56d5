"""Executions of several samples in what a rollout function returns."""

from __future__ import annotations

import pytest
from slime_compat.adapters.rollout import _flat, _number
from slime_compat.views.samples.sample import viewed
from slime_core.errors import SampleError
from slime_core.run.metrics import outcomes
from slime_core.samples import Sample, Status, columns


def made(reward, rollout_id=None):
    return viewed(
        Sample(
            tokens=[1, 2, 3],
            response_length=2,
            rollout_log_probs=[-1.0, -1.0],
            status=Status.COMPLETED,
            reward=reward,
            rollout_id=rollout_id,
        )
    )


def test_samples_of_one_execution_are_one_attempt():
    group = list(_flat([[made(1.0, 5), made(1.0, 5), made(1.0, 5)], [made(0.0, 6)]], None))
    _number([group])
    assert columns(group).rollout_ids.tolist() == [0, 0, 0, 1]
    assert [one.reward for one in outcomes(group)] == [1.0, 0.0]


@pytest.mark.parametrize("ids", [(None, None), (1, None), (1, 2)])
def test_an_execution_whose_samples_do_not_say_that_they_are_one_is_refused(ids):
    nested = [[made(1.0, one) for one in ids], [made(0.0)]]
    with pytest.raises(SampleError, match="must give all of them the same rollout_id"):
        list(_flat(nested, None))


def test_a_flat_group_has_an_execution_a_sample():
    group = list(_flat([made(1.0), made(0.0)], None))
    _number([group])
    assert columns(group).rollout_ids.tolist() == [0, 1]
