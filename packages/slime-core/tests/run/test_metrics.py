"""Metrics of samples, by numbers worked out by hand."""

from slime_core.run.metrics import request_metrics
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
