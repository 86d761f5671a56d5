"""Timing on this machine's CPU: of which calls the answers are told."""

from __future__ import annotations

from dataclasses import asdict

from slime_kernels.sandbox.device_jobs import _Timed
from slime_kernels.timing.clock import CpuClock
from slime_kernels.timing.measure import TimingPlan

MODULE = """
import torch
def get_inputs():
    return [torch.randn(4)]
def get_init_inputs():
    return []
"""


class Quick(CpuClock):
    """A clock that leaves caches as they are."""

    def flush(self):
        pass


def test_each_try_of_a_timing_tells_answers_of_its_own():
    """The median is that of the last try."""
    plan = TimingPlan(warm_up=2, n=100, tries=3, most_noise=-1.0)  # with more noise than that, always
    header = {"device": "cpu", "plan": asdict(plan), "problem": MODULE, "draws": 3, "places": 5}
    timed, calls = _Timed(header, Quick()), []

    def module(x):
        calls.append(timed._seed)
        return x.clone()

    timed.model = module
    assert timed.measure()["tries"] == 3
    told = {answer["seed"] for answer in timed.answers}
    n_told = [sum(seed in told for seed in calls[first : first + 100]) for first in (2, 102, 202)]
    # a tenth of 100 is drawn: at least 3, but for one draw in 500, and 12 at most, beside the last call of all
    assert all(3 <= n <= 12 + (one == 2) for one, n in enumerate(n_told)), n_told
