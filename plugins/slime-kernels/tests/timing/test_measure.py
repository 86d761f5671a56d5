"""Measuring: on a device whose times are worked out by hand, and on the CPU with real work."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from slime_kernels.timing.clock import CpuClock
from slime_kernels.timing.measure import TimingPlan, measure, noise_of


class Device:
    """A device in virtual time: a call takes 10 us, 4 where caches are warm, and leaves `hidden_us` to another stream."""

    source = "virtual"

    def __init__(self, *, hidden_us=0.0, jitter=()):
        self.now, self.hidden_us, self._jitter = 0.0, hidden_us, list(jitter)
        self.warm, self.busy_until, self.done = False, 0.0, []

    def call(self):
        self.now += 4.0 if self.warm else 10.0
        self.now += self._jitter.pop(0) if self._jitter else 0.0
        self.warm, self.busy_until = True, self.now + self.hidden_us
        self.done.append("call")

    def flush(self):
        self.warm = False
        self.done.append("flush")

    def mark(self):
        self.done.append("mark")
        return self.now

    def between_us(self, first, last):
        self.done.append("between")
        return last - first

    def drain_us(self):
        self.done.append("drain")
        late = max(0.0, self.busy_until - self.now)
        self.now += late + 5.0  # what waiting for an idle device takes
        return late + 5.0


def test_a_call_is_measured_with_cold_caches_and_idle_waiting_is_not_its_time():
    device, numbers = Device(), []
    found = measure(device.call, device, TimingPlan(warm_up=2, n=20), before=numbers.append)
    assert (found.median_us, found.noise, found.n, found.tries, found.trusted) == (10.0, 0.0, 20, 1, True)
    assert numbers == [-2, -1, *range(20)]
    sample = ["flush", "mark", "call", "mark", "between", "drain"]
    assert device.done == ["call", "call", *["drain"] * 11, *sample * 20]


def test_work_that_is_left_to_another_stream_counts():
    device = Device(hidden_us=7.0)
    assert measure(device.call, device, TimingPlan(n=20)).median_us == pytest.approx(17.0)


def test_what_is_noisy_is_measured_again_and_then_not_trusted():
    plan = TimingPlan(warm_up=0, n=20, tries=3)
    settles = Device(jitter=[0.0, 10.0] * 10)  # samples of 10 and 20 us, then only 10
    found = measure(settles.call, settles, plan)
    assert (found.median_us, found.tries, found.trusted) == (10.0, 2, True)
    never = Device(jitter=[0.0, 10.0] * 30)
    found = measure(never.call, never, plan)
    assert (found.median_us, found.tries, found.trusted) == (15.0, 3, False)
    assert found.noise == pytest.approx(5 / 15)


def test_a_slow_call_is_measured_less_often_and_no_second_time():
    device = Device(jitter=[0.0, 10.0] * 100)
    found = measure(device.call, device, TimingPlan(warm_up=0, n=100, least_n=10, most_s=0.0))
    assert (found.n, found.tries, found.trusted) == (10, 1, False)


def test_noise_by_hand():
    # n = 100: the interval of the median lies between the 41st and the 61st of the sorted samples
    assert noise_of([9.0, 11.0] * 50) == pytest.approx(1 / 10)
    # half of them 10, then half 20: the interval is 10 wide, the halves are 10 apart, the median is 15
    assert noise_of([10.0] * 50 + [20.0] * 50) == pytest.approx(10 / 15)
    assert noise_of([3.0] * 100) == 0.0
    assert noise_of([3.0] * 5) == math.inf
    assert noise_of([0.0] * 100) == math.inf


BYTES = bytes(16 << 20)


def work():
    hashlib.sha256(BYTES)


def test_on_the_cpu_real_work_of_another_thread_is_waited_for():
    plan, tasks = TimingPlan(warm_up=1, n=10, tries=1), []
    with ThreadPoolExecutor(1) as stream:

        def hidden():
            tasks.append(stream.submit(work))

        direct = measure(work, CpuClock(), plan)
        waited = measure(hidden, CpuClock(wait=lambda: wait(tasks)), plan)
        fooled = measure(hidden, CpuClock(), plan)
    assert waited.median_us > direct.median_us / 3
    assert fooled.median_us < direct.median_us / 3
