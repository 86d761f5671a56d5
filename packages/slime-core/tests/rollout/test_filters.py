"""The filter `nonzero-std`, by hand."""

import pytest
from slime_core.errors import SampleError
from slime_core.rollout.filters import nonzero_std
from slime_core.samples import Sample


def group(*rewards):
    return [Sample(index=i, reward=reward) for i, reward in enumerate(rewards)]


def test_a_group_of_different_rewards_is_kept():
    assert nonzero_std(group(0.0, 1.0, 1.0)) is None


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((1.0, 1.0), "zero_std_1.0"),
        ((0.1,) * 7, "zero_std_0.1"),
        ((-0.0, 0.0), "zero_std_0.0"),
        ((-1, -1), "zero_std_-1.0"),
    ],
)
def test_a_group_of_equal_rewards_is_dropped_with_the_reward_as_reason(rewards, reason):
    assert nonzero_std(group(*rewards)) == reason


def test_the_threshold_is_an_unbiased_standard_deviation():
    rewards = group(1.0, 3.0)  # unbiased std: sqrt(2) = 1.41421..., biased 1
    assert nonzero_std(rewards, threshold=1.414) is None
    assert nonzero_std(rewards, threshold=1.415) == "zero_std_2.0"


def test_a_dict_is_judged_by_its_reward_key():
    rewards = group({"score": 1.0, "format": 0.0}, {"score": 0.0, "format": 0.0})
    assert nonzero_std(rewards, reward_key="score") is None
    assert nonzero_std(rewards, reward_key="format") == "zero_std_0.0"


def test_a_group_of_one_is_an_error():
    with pytest.raises(SampleError, match=r"sample 0: .* group of 1; wanted two or more"):
        nonzero_std(group(1.0))
