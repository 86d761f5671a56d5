"""Metrics of samples, by numbers worked out by hand."""

from collections import Counter

import numpy as np
import pytest
from slime_core.protocols import MULTI_TURN
from slime_core.run.metrics import evaluation_metrics, has_repetition, request_metrics, rollout_metrics
from slime_core.samples import Sample


def test_prefix_cache_and_time_outside_the_engine_are_averaged_over_samples():
    samples = [
        Sample(index=i, tokens=[1] * 4, response_length=2, loss_mask=[1, 1], timings={"generate": 1.0})
        for i in range(2)
    ]
    samples[0].prefix_cache_info = {"cached_tokens": 3, "total_prompt_tokens": 4}
    samples[1].prefix_cache_info = {"cached_tokens": 0, "total_prompt_tokens": 4}
    samples[1].non_generation_time = 3.0
    assert request_metrics([samples], rollout_s=2.0) == {
        "perf/rollout_tokens_per_sec": 2.0,
        "perf/non_generation_time/mean": 1.5,
        "perf/non_generation_time/max": 3.0,
        "rollout/prefix_cache_hit_rate": 0.375,
        "rollout/avg_cached_tokens_per_sample": 1.5,
    }


def test_samples_that_say_nothing_of_either_have_neither():
    sample = Sample(index=0, tokens=[1, 2], response_length=1, loss_mask=[1], timings={"generate": 1.0})
    assert request_metrics([[sample]], rollout_s=1.0) == {"perf/rollout_tokens_per_sec": 1.0}


def test_request_metrics_are_tokens_a_second_and_what_requests_took():
    def sample(n_tokens, **timings):
        return Sample(tokens=[1] * (n_tokens + 2), response_length=n_tokens, timings=timings)

    masked = sample(4, generate=1.0, queue_time=0.5)
    masked.loss_mask = [1, 0, 0, 1]
    groups = [[masked, sample(6, generate=1.0, queue_time=1.5)]]
    assert request_metrics(groups, rollout_s=4.0) == {
        "perf/rollout_tokens_per_sec": 2.0,
        "perf/request/queue_time/mean": 1.0,
        "perf/request/queue_time/max": 1.5,
    }
    assert request_metrics([[sample(5)]], rollout_s=4.0) == {}


def scored(reward: float, *, response: str = "", n_tokens: int = 1, **fields) -> Sample:
    return Sample(
        tokens=[1] * (n_tokens + 1), response_length=n_tokens, reward=reward, response=response, **fields
    )


def test_pass_rates_of_training_are_means_over_groups_of_the_unbiased_estimate():
    """Of 4 samples 1 and 3 are right: pass@1 1/4 and 3/4; pass@2 1 - 3/6 and 1 - 0/6; pass@4 1 and 1. 0.9 is not right."""
    groups = [[scored(r) for r in rewards] for rewards in ((1, 0, 0.9, 0), (1, 1, 0, 1))]
    found = rollout_metrics(groups, reward_key=None, drops=Counter())
    rates = {name: value for name, value in found.items() if name.startswith("passrate/")}
    assert rates == pytest.approx({"passrate/pass@1": 0.5, "passrate/pass@2": 0.75, "passrate/pass@4": 1.0})


def test_an_execution_of_several_samples_is_one_attempt_that_its_last_trained_sample_decides():
    """Two attempts: the first in two branches, the last of them right; the second wrong, beside a baseline that is right."""
    first = [scored(0, rollout_id=7), scored(1, rollout_id=7)]
    second = [scored(0, rollout_id=8), scored(1, rollout_id=8, remove_sample=True)]
    found = rollout_metrics([[*first, *second]], reward_key=None, drops=Counter())
    rates = {name: value for name, value in found.items() if name.startswith("passrate/")}
    assert rates == {"passrate/pass@1": 0.5, "passrate/pass@2": 1.0}
    told = evaluation_metrics(
        "e", [[*first, *second], [scored(1), scored(1)]], reward_key=None, threshold=1.0
    )
    assert (told["eval/e"], told["eval/e-pass@1"], told["eval/e-pass@2"]) == (0.75, 0.75, 1.0)
    assert "eval/e-pass@4" not in told


def test_lengths_of_an_evaluation_are_without_what_environments_put_in_as_those_of_training():
    """7 tokens of which an environment put in 4, and 1 token."""
    put_in = scored(1, n_tokens=7, environment_spans=[[1, 5]], loss_mask=[1, 0, 0, 0, 0, 1, 1])
    found = evaluation_metrics("e", [[put_in, scored(0)]], reward_key=None, threshold=1.0)
    assert found["eval/e/response_len/mean"] == (3 + 1) / 2


def test_a_long_end_that_compresses_to_less_than_a_tenth_is_repetition():
    drawn = "".join(map(chr, np.random.default_rng(0).integers(32, 127, 10_000)))
    assert has_repetition(drawn + "abc" * 4000)
    assert not has_repetition("abc" * 4000 + drawn)
    assert not has_repetition("a" * 9_999)
    assert has_repetition("\ud800" * 10_000)  # half of a character, as of bytes that are no UTF-8
    groups = [[scored(0, response="a" * 10_000), scored(0, response="a")]]
    found = rollout_metrics(groups, reward_key=None, drops=Counter())
    assert found["rollout/repetition_frac"] == 0.5


def test_lengths_of_conversations_are_told_with_and_without_what_was_put_in():
    """5 tokens of which 2 were put in, in 2 turns; 2 tokens in 1 turn; and a sample that is no conversation."""
    record = {"environment_tokens": 2, "ended_by": "done"}
    long = scored(1, n_tokens=5, environment_spans=[[1, 3]], metadata={MULTI_TURN: record | {"turns": 2}})
    short = scored(0, n_tokens=2, metadata={MULTI_TURN: record | {"turns": 1, "environment_tokens": 0}})
    found = rollout_metrics([[long, short], [scored(0, n_tokens=9)]], reward_key=None, drops=Counter())
    assert {name: value for name, value in found.items() if name.startswith("multi_turn/")} == {
        "multi_turn/raw_response_length/response_length_mean": 3.5,
        "multi_turn/raw_response_length/response_length_max": 5.0,
        "multi_turn/raw_response_length/response_length_min": 2.0,
        "multi_turn/wo_obs_response_length/response_length_mean": 2.5,
        "multi_turn/wo_obs_response_length/response_length_max": 3.0,
        "multi_turn/wo_obs_response_length/response_length_min": 2.0,
        "multi_turn/multi_turn_metric/round_number_mean": 1.5,
        "multi_turn/multi_turn_metric/round_number_max": 2.0,
        "multi_turn/multi_turn_metric/round_number_min": 1.0,
    }
