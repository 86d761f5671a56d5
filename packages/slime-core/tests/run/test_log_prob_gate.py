"""The gate on log-probs, by numbers worked out by hand: which tokens count, and that one bad sample is not averaged away."""

from __future__ import annotations

import math

import numpy as np
import pytest
from slime_core.data.make_batch import make_batch
from slime_core.errors import TrainerError
from slime_core.run.log_prob_gate import MEAN, ON_POLICY, WORST, WORST_SAMPLE, LogProbGate, agreement
from slime_core.samples import Sample


def batch_of(*samples, step=5):
    """Samples from number 100 on, of parts (version, number of tokens); step 5 trains version 4."""
    made = []
    for index, parts in enumerate(samples):
        one = Sample(index=100 + index, group_index=0, tokens=[1], reward=0.0)
        for version, n in parts:
            one.append_response([2] * n, weight_version=version, finish_reason="stop")
        made.append(one)
    return make_batch(
        step,
        [made],
        global_batch_size=len(made),
        temperature=1.0,
        transform=lambda rewards, groups: rewards,
        reducer=lambda view: view.loss_mask,
    )


def found(batch, differences, *, by_own_weights=False, counted=None):
    differences = np.array(differences)
    counted = np.ones(len(differences), dtype=bool) if counted is None else np.array(counted)
    return agreement(batch, differences, counted, by_own_weights=by_own_weights)


def test_the_worst_sample_is_found_where_the_mean_says_nothing():
    """One of 100 samples differs by 0.9 nats a token: the mean is 0.009."""
    batch = batch_of(*[[("4", 10)]] * 100)
    differences = [0.0] * 730 + [0.9] * 10 + [0.0] * 260
    metrics = found(batch, differences) | {MEAN: 0.009}
    assert metrics == {WORST: pytest.approx(0.9), WORST_SAMPLE: 173, MEAN: 0.009}
    with pytest.raises(TrainerError, match=r"step 5: .* of sample 173 differ by 0.9 .* the limit is 0.5"):
        LogProbGate(0.5).check(metrics, step=5)
    LogProbGate(0.91).check(metrics, step=5)


def test_tokens_of_older_weights_are_left_out_unless_they_are_judged_by_their_own():
    """Sample 100 has 8 tokens of version 3 and 8 of version 4, sample 101 has 8 of unknown weights."""
    batch = batch_of([("3", 8), ("4", 8)], [("initial", 8)])
    differences = [2.0] * 8 + [0.25] * 8 + [0.125] * 8
    assert found(batch, differences) == {WORST: 0.25, WORST_SAMPLE: 100, ON_POLICY: 0.1875}
    assert found(batch, differences, by_own_weights=True) == {WORST: 1.125, WORST_SAMPLE: 100}
    LogProbGate(0.5).check(found(batch, differences) | {MEAN: 0.79}, step=5)  # the policy has moved, no more
    assert found(batch_of([("3", 8)]), [2.0] * 8) == {}
    with pytest.raises(TrainerError, match="differ by 2 nats on average"):  # nothing else to compare
        LogProbGate(0.5).check({MEAN: 2.0}, step=5)


def test_few_tokens_count_as_eight_and_masked_ones_not_at_all():
    batch = batch_of([("4", 2)], [("4", 8)])
    counted = [True] * 2 + [True] * 4 + [False] * 4
    metrics = found(batch, [2.0] * 2 + [0.5] * 4 + [99.0] * 4, counted=counted)
    assert metrics == {WORST: 0.5, WORST_SAMPLE: 100}  # 2 * 2 / 8, not 2; the other has 4 * 0.5 / 8


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_is_no_agreement(bad):
    batch = batch_of([("4", 8)], [("4", 8)])
    metrics = found(batch, [0.0] * 12 + [bad] + [0.0] * 3)
    assert metrics[WORST_SAMPLE] == 101
    with pytest.raises(TrainerError, match="sample 101"):
        LogProbGate(1e9).check(metrics | {MEAN: math.nan}, step=5)


def test_a_step_with_one_fresh_token_is_not_judged_by_it_alone():
    batch = batch_of([("3", 99), ("4", 1)])
    metrics = found(batch, [0.01] * 99 + [0.6])
    assert metrics == {WORST: pytest.approx(0.075), WORST_SAMPLE: 100, ON_POLICY: pytest.approx(0.075)}
    LogProbGate(0.5).check(metrics | {MEAN: 0.0159}, step=5)


def test_a_nan_of_a_stale_token_is_no_agreement():
    batch = batch_of([("3", 8)], [("4", 8)])
    metrics = found(batch, [math.nan] * 8 + [0.01] * 8)
    with pytest.raises(TrainerError, match="differ by nan nats on average"):
        LogProbGate(0.5).check(metrics | {MEAN: math.nan}, step=5)


def of_sample(worst):
    return {MEAN: 0.0, WORST: worst, WORST_SAMPLE: 7}


@pytest.mark.parametrize(
    ("before", "worst", "limit"),
    [
        ([], 0.49, None),  # the first step has nothing to be compared with
        ([1e-6], 0.099, None),
        ([1e-6], 0.101, "0.1"),
        ([1e-6, 2e-3, 1e-6], 0.19, None),  # 100 times the largest
        ([1e-6, 2e-3, 1e-6], 0.21, "0.2"),
        ([0.01], 0.49, None),  # as bfloat16: 100 times it is above the limit of every step
        ([0.01], 0.51, "0.5"),
    ],
)
def test_a_run_that_agreed_far_better_is_held_closer(before, worst, limit):
    gate = LogProbGate(None)
    for step, earlier in enumerate(before, 1):
        gate.check(of_sample(earlier), step=step)
    if limit is None:
        gate.check(of_sample(worst), step=9)
        return
    with pytest.raises(TrainerError, match=f"step 9: .* of sample 7 .*; the limit is {limit}[;,]"):
        gate.check(of_sample(worst), step=9)


def test_a_chosen_limit_and_a_cache_that_is_kept_do_not_tighten():
    for gate in (LogProbGate(0.5), LogProbGate(None, expects_jumps=True)):
        gate.check(of_sample(1e-6), step=1)
        gate.check(of_sample(0.49), step=2)


def test_a_step_of_stale_tokens_alone_tells_nothing_of_samples():
    gate = LogProbGate(None)
    gate.check({MEAN: 0.3}, step=1)
    assert gate.largest is None
