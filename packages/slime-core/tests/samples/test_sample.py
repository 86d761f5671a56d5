"""Sample: lengths always agree, and messages name the sample."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from slime_core.errors import SampleError
from slime_core.samples import Sample, Status


def test_append_trainable_tokens():
    sample = Sample(index=3, tokens=[1, 2])
    sample.append_response(
        [5, 6], log_probs=[-0.5, -0.25], text="ab", finish_reason="stop", weight_version="7"
    )
    assert (sample.tokens, sample.response_tokens, sample.response) == ([1, 2, 5, 6], [5, 6], "ab")
    assert (sample.status, sample.weight_versions, sample.prompt_length) == (Status.COMPLETED, ["7"], 2)
    assert sample.effective_response_length == 2


def test_environment_tokens_are_masked_and_get_zero_log_probs():
    sample = Sample(index=3, tokens=[1])
    sample.append_response([5], log_probs=[-0.5])
    sample.append_response([8, 9], trainable=False)
    sample.append_response([6], log_probs=[-0.25], finish_reason="length")
    assert sample.loss_mask == [1, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.5, 0.0, 0.0, -0.25]
    assert sample.status is Status.TRUNCATED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1, 2], "log_probs": [0.0]}, "sample 3: 1 log_probs for 2 tokens"),
        (
            {"tokens": [1], "log_probs": [0.0], "trainable": False},
            "sample 3: log_probs given for tokens that are not",
        ),
        ({"tokens": [1]}, "sample 3: earlier response tokens have log_probs and these do not"),
        ({"tokens": [1], "log_probs": [0.0], "finish_reason": "done"}, "finish_reason 'done'"),
    ],
)
def test_refused_append_changes_nothing(arguments, message):
    sample = Sample(index=3, tokens=[1])
    sample.append_response([5], log_probs=[-0.5])
    before = sample.to_dict()
    with pytest.raises(SampleError, match=message):
        sample.append_response(**arguments)
    assert sample.to_dict() == before


@pytest.mark.parametrize("environment", [[[8, 9]], [[8], [9]], [[]], []])
@pytest.mark.parametrize("log_probs", [[-0.5], None])
def test_environment_tokens_before_the_first_of_the_policy_ask_for_nothing(environment, log_probs):
    sample = Sample(index=3, tokens=[1])
    for tokens in environment:
        sample.append_response(tokens, trainable=False)
    sample.append_response([5], log_probs=log_probs)
    sample.append_response([7], trainable=False)
    sample.append_response([6], log_probs=log_probs)
    before = [0.0] * sum(len(tokens) for tokens in environment)
    assert sample.rollout_log_probs == (None if log_probs is None else [*before, -0.5, 0.0, -0.5])
    assert sample.loss_mask == [0] * len(before) + [1, 0, 1]
    with pytest.raises(SampleError, match="sample 3: earlier response tokens"):
        sample.append_response([4], log_probs=None if log_probs else [-0.5])


def test_an_environments_tokens_alone_have_log_probs_of_zero():
    sample = Sample(index=3, tokens=[1])
    sample.append_response([5, 6], trainable=False)
    sample.append_response([7], trainable=False)
    assert sample.rollout_log_probs == [0.0, 0.0, 0.0]


def test_log_probs_of_tokens_that_were_masked_later_are_not_lost():
    sample = Sample(index=3, tokens=[1])
    sample.append_response([5, 6], log_probs=[-0.5, -0.25])
    sample.loss_mask = [0, 0]
    with pytest.raises(SampleError, match="sample 3: earlier response tokens have log_probs"):
        sample.append_response([7])
    sample.append_response([7], log_probs=[-1.0])
    assert sample.rollout_log_probs == [-0.5, -0.25, -1.0]


def test_refused_top_p_tokens_change_nothing():
    sample = Sample(index=3, tokens=[1])
    sample.append_response([5], trainable=False)
    before = sample.to_dict()
    with pytest.raises(SampleError, match="top_p_tokens has 2 offsets for 2 tokens"):
        sample.append_response([9, 9], log_probs=[-0.5, -0.5], top_p_tokens=([9], [0, 1]))
    assert sample.to_dict() == before


def test_wrong_mask_length_is_named():
    sample = Sample(index=17, tokens=[1, 2, 3], response_length=2, loss_mask=[1])
    with pytest.raises(SampleError, match="sample 17: loss_mask has 1 entries for response_length 2"):
        sample.check()


def test_dict_round_trip_and_unknown_field():
    sample = Sample(index=1, tokens=[1, 2], response_length=1, status=Status.ABORTED, metadata={"a": [1]})
    assert Sample.from_dict(sample.to_dict()) == sample
    with pytest.raises(SampleError, match=r"unknown fields \['colour'\]"):
        Sample.from_dict({"index": 1, "colour": "red"})


def test_reward_key_must_fit_the_reward():
    assert Sample(index=1, reward={"acc": 1, "len": 2}).reward_value("acc") == 1.0
    with pytest.raises(SampleError, match="reward_key is None"):
        Sample(index=1, reward={"acc": 1}).reward_value()
    with pytest.raises(SampleError, match="not a dict"):
        Sample(index=1, reward=1.0).reward_value("acc")
    with pytest.raises(SampleError, match="sample 1: has no reward"):
        Sample(index=1).reward_value()


def test_ids_that_tokens_were_drawn_from_are_joined():
    """Two tokens that an environment put in, and one that could have been any, have none."""
    sample = Sample(index=1, tokens=[1, 2])
    sample.append_response([3], trainable=False)
    sample.append_response(
        [4, 5], log_probs=[-0.5, -0.5], top_p_tokens=(np.array([4, 6, 5]), np.array([0, 2, 3]))
    )
    sample.append_response([6], trainable=False)
    sample.append_response([7, 8], log_probs=[-0.5, -0.5], top_p_tokens=([8, 9], [0, 0, 2]))
    sample.check()
    assert sample.rollout_top_p_token_ids == [4, 6, 5, 8, 9]
    assert sample.rollout_top_p_token_offsets == [0, 0, 2, 3, 3, 3, 5]
    with pytest.raises(SampleError, match="sample 1: top_p_tokens has 2 offsets for 2 tokens; wanted 3"):
        sample.append_response([9, 9], log_probs=[-0.5, -0.5], top_p_tokens=([9], [0, 1]))


def test_routes_of_the_engine_are_those_of_the_last_call():
    sample = Sample(index=1, tokens=[1, 2])
    first, second = np.arange(6).reshape(3, 2, 1), np.ones((6, 2, 1))
    sample.append_response([3, 4], log_probs=[-0.5, -0.5], routed_experts=first)
    assert sample.rollout_routed_experts is first
    sample.append_response([5], trainable=False)
    assert sample.rollout_routed_experts[..., 0].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    sample.append_response([6, 7], log_probs=[-0.5, -0.5], routed_experts=second)
    assert sample.rollout_routed_experts is second
    sample.check()
    with pytest.raises(SampleError, match="sample 1: routed_experts has 6 rows for 8 tokens; wanted 7"):
        sample.append_response([8], log_probs=[-0.5], routed_experts=second)
    assert len(sample.tokens) == 7


def test_a_copy_has_the_same_values_and_fields_of_its_own():
    sample = Sample(index=3, tokens=[1, 2], metadata={"a": 1})
    copied = copy.copy(sample)
    assert copied == sample
    assert copied.metadata is sample.metadata
    copied.reward = 1.0
    assert sample.reward is None
