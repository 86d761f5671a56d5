"""A user's function that makes the training data: whose columns a row takes that it leaves out."""

from __future__ import annotations

import dataclasses

import pytest
from slime_core.data.conversion import converted
from slime_core.errors import SampleError
from slime_core.samples import Sample, Status

SAMPLED = Sample(
    index=0, group_index=0, rollout_id=0, tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-1.0, -2.0],
    reward=1.0, status=Status.COMPLETED,
)  # fmt: skip
GREEDY = dataclasses.replace(
    SAMPLED, tokens=[1, 4, 5], rollout_log_probs=[-0.1, -0.2], reward=0.0, remove_sample=True,
    train_metadata={"is_baseline": True},
)  # fmt: skip
OTHER = dataclasses.replace(SAMPLED, index=1, rollout_id=None, reward=0.5)


def as_they_are(args, samples):
    return {
        "tokens": [one.tokens for one in samples],
        "response_lengths": [one.response_length for one in samples],
        "sample_indices": [one.index for one in samples],
    }


@pytest.mark.parametrize("order", [[SAMPLED, GREEDY, OTHER], [OTHER, GREEDY, SAMPLED]])
def test_each_sample_of_an_execution_keeps_its_own_columns(order):
    made = converted(as_they_are, None, order).samples
    for one, of in zip(made, order, strict=True):
        assert (one.tokens, one.rollout_log_probs, one.reward) == (of.tokens, of.rollout_log_probs, of.reward)
        assert (one.remove_sample, one.train_metadata) == (of.remove_sample, of.train_metadata)


def test_samples_of_an_execution_with_the_same_tokens_are_taken_in_turn():
    again = dataclasses.replace(SAMPLED, reward=0.25)
    made = converted(as_they_are, None, [SAMPLED, again]).samples
    assert [one.reward for one in made] == [1.0, 0.25]


def test_a_row_of_an_execution_of_several_samples_says_which_by_its_tokens():
    def shortened(args, samples):
        return as_they_are(args, samples) | {
            "tokens": [one.tokens[:2] for one in samples],
            "response_lengths": [1, 1],
        }

    with pytest.raises(
        SampleError, match=r"in row 0 the sample index 0, which 2 samples of one execution share, and tokens"
    ):
        converted(shortened, None, [SAMPLED, GREEDY])
    made = converted(shortened, None, [SAMPLED, OTHER]).samples
    assert [(one.tokens, one.rollout_log_probs) for one in made] == [([1, 2], None)] * 2
