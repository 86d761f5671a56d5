"""A limit on the computing time of a block."""

import time

import pytest
from slime_rm.math.time_limit import LimitExceeded, cpu_limit


def test_a_block_is_stopped_at_its_limit_even_when_it_swallows_exceptions():
    began = time.process_time()
    with pytest.raises(LimitExceeded), cpu_limit(0.1):
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue
    assert time.process_time() - began < 2


def test_a_block_within_its_limit_leaves_no_timer():
    with cpu_limit(0.05):
        pass
    began = time.process_time()
    while time.process_time() - began < 0.15:
        pass
