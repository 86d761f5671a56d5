"""The run's engine behind HTTP, requests that differ, runs that repeat, executions that fan out."""

from __future__ import annotations

import pytest
from slime_core.errors import DataError

GENERATE = "--custom-generate-function-path"


def test_any_client_reaches_the_engine(train):
    run = train(GENERATE, "other_clients.by_aiohttp", "--num-rollout", "2")
    for sample in run.samples():
        assert sample["weight_versions"] == [str(sample["index"] // 16)]
        assert len(sample["rollout_log_probs"]) == sample["response_length"] > 0


def test_what_the_engine_does_not_have_is_refused_by_name(train):
    with pytest.raises(
        DataError, match=r"sampling_params.json_schema: found '\{\}'; wanted one of temperature"
    ):
        train(GENERATE, "other_clients.asks_too_much")


def test_the_default_generate_function_may_be_called_with_other_parameters(train):
    run = train(GENERATE, "other_clients.by_default", "--num-rollout", "1")
    assert {sample["response_length"] for sample in run.samples()} <= {1, 2}


def test_agents_of_one_prompt_draw_differently_and_score_themselves(train):
    run = train(GENERATE, "other_clients.solver", "--num-rollout", "1", "--run-name", "one")
    samples = run.samples()
    assert len(samples) == 16 * 3
    for begin in range(0, 48, 3):
        agents = samples[begin : begin + 3]
        assert [one["metadata"]["agent"] for one in agents] == [0, 1, 2]
        assert [one["reward"] for one in agents] == [0.0, 1.0, 2.0]
        assert len({one["rollout_id"] for one in agents}) == 1
    assert any(
        len({str(one["tokens"]) for one in samples[begin : begin + 3]}) == 3 for begin in range(0, 48, 3)
    )
    again = train(GENERATE, "other_clients.solver", "--num-rollout", "1", "--run-name", "again").samples()
    assert [one["tokens"] for one in again] == [one["tokens"] for one in samples]


@pytest.mark.parametrize("loop", ["sync", "fully-async"])
def test_aborted_samples_go_on_where_they_were(train, loop):
    flags = [GENERATE, "other_clients.by_default", "--partial-rollout", "--over-sampling-batch-size", "6"]
    run = train(*flags, "--loop", loop, "--num-rollout", "3", "--rollout-in-completion-order")
    assert len(run.samples()) == 3 * 16
    assert {sample["status"] for sample in run.samples()} <= {"completed", "truncated"}
