"""Soft overlong punishment, by hand."""

import numpy as np
import pytest
from slime_core.rewards.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (120, -1)]
)
def test_penalty_falls_over_the_buffer(length, penalty):
    found = overlong_penalty(np.array([length]), max_response_len=100, overlong_buffer_len=20)
    assert found.tolist() == [penalty]


def test_factor_is_what_a_full_response_loses():
    found = overlong_penalty(
        np.array([100, 90]), max_response_len=100, overlong_buffer_len=20, overlong_penalty_factor=0.3
    )
    assert found.tolist() == pytest.approx([-0.3, -0.15])
