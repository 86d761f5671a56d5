"""`measure`: how long a call takes on a device, and whether that is to be trusted."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_kernels.timing.clock import DeviceClock

#: Deadline of a job on a GPU that runs the problem's own module at its own size, seconds: torch.compile takes minutes.
MODULE_S = 300.0
_IDLE_DRAINS = 10
#: 1.96 standard deviations of the number of samples below the median, of n: 1.96 sqrt(n) / 2.
_HALF_WIDTH = 0.98


@dataclass(frozen=True, kw_only=True)
class TimingPlan:
    """How a call is measured."""

    warm_up: int = 10
    """Calls before the first that counts."""
    n: int = 100
    """Calls that count."""
    tries: int = 3
    """Times that all is measured, at most, while there is too much noise."""
    most_noise: float = 0.05
    """Largest noise with which a median is trusted, as a part of it."""
    most_s: float = 20.0
    """Seconds after which a try has fewer calls, `least_n` at least, and no other follows."""
    least_n: int = 10


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How long a call takes."""

    median_us: float
    noise: float
    n: int
    tries: int
    trusted: bool
    """The noise is within the plan's bound."""


def measure(
    call: Callable[[], object],
    clock: DeviceClock,
    plan: TimingPlan,
    *,
    before: Callable[[int], object] = lambda _: None,
) -> Measurement:
    """Return the median time of a call, with caches flushed before each, and all streams waited for behind it.

    The time of one call is what lies between two marks of the caller's stream, and what the device goes on doing after the second
    beyond the time that waiting for an idle device takes: work that a call leaves to another stream counts as its own.

    Args:
        call: gives the device its work.
        clock: of the device.
        plan: how often.
        before: what is done before each call and does not count; gets the number of the call in its try, negative while warming up.
    """
    for number in range(plan.warm_up):
        before(number - plan.warm_up)
        call()
    clock.drain_us()
    idle_us = statistics.median(clock.drain_us() for _ in range(_IDLE_DRAINS))
    end = time.perf_counter() + plan.most_s
    tries = 0
    while True:
        tries += 1
        samples = _samples(call, clock, plan, before, idle_us, end)
        noise = noise_of(samples)
        trusted = noise <= plan.most_noise
        if trusted or tries == plan.tries or time.perf_counter() > end:
            median = statistics.median(samples)
            return Measurement(median_us=median, noise=noise, n=len(samples), tries=tries, trusted=trusted)


def _samples(
    call: Callable[[], object],
    clock: DeviceClock,
    plan: TimingPlan,
    before: Callable[[int], object],
    idle_us: float,
    end: float,
) -> list[float]:
    samples: list[float] = []
    while len(samples) < plan.n and (len(samples) < plan.least_n or time.perf_counter() < end):
        before(len(samples))
        clock.flush()
        first = clock.mark()
        call()
        last = clock.mark()
        on_stream = clock.between_us(first, last)
        samples.append(on_stream + max(0.0, clock.drain_us() - idle_us))
    return samples


def noise_of(samples: Sequence[float]) -> float:
    """Return how far the median of samples is from being known, as a part of it; infinite where they are fewer than 6, or none is above 0.

    It is the larger of two: half the width of the median's 95% confidence interval, between two of the sorted samples, whatever their
    distribution is; and how far the medians of the first and the second half are apart, which a device that heats up shows.

    Source: order statistics of a binomial distribution (Conover, Practical Nonparametric Statistics, 3.2).
    """
    n, median = len(samples), statistics.median(samples) if samples else 0.0
    if n < 6 or median <= 0:
        return math.inf
    ordered, half = sorted(samples), _HALF_WIDTH * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - half)), min(n - 1, math.ceil(n / 2 + half))
    width = (ordered[high] - ordered[low]) / 2
    drift = abs(statistics.median(samples[: n // 2]) - statistics.median(samples[n // 2 :]))
    return max(width, drift) / median
