"""Reward transforms: by hand, and against an explicit loop over groups."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_core.rewards.transforms import group_norm, raw


def transformed(rewards, groups, **options) -> list[float]:
    return group_norm(np.array(rewards, dtype=np.float32), np.array(groups), **options).tolist()


def test_right_wrong_wrong_right_is_half_the_root_of_three():
    # mean 1/2, unbiased variance 1/3
    expected = 0.5 / (3**-0.5 + 1e-6)
    assert transformed([1, 0, 0, 1], [0] * 4) == pytest.approx(
        [expected, -expected, -expected, expected], rel=1e-15
    )
    assert expected == pytest.approx(0.8660254, abs=2e-6)


def test_population_variance_gives_ones():
    assert transformed([1, 0, 0, 1], [0] * 4, std_ddof=0, std_eps=0.0) == [1, -1, -1, 1]


def test_without_std_rewards_are_centred():
    assert transformed([1, 0, 0, 1], [0] * 4, disable_grpo_std_normalization=True) == [0.5, -0.5, -0.5, 0.5]


def test_leave_one_out_compares_with_the_mean_of_the_others():
    # 3 against (0 + 0)/2, 0 against (3 + 0)/2
    assert transformed([3, 0, 0], [0] * 3, disable_grpo_std_normalization=True, leave_one_out=True) == [
        3,
        -1.5,
        -1.5,
    ]


def test_groups_are_told_apart_by_id_and_not_by_position():
    assert transformed([1, 10, 3, 30], [5, 2, 5, 2], disable_grpo_std_normalization=True) == [-1, -10, 1, 10]


def test_groups_may_differ_in_size():
    rewards = transformed([0, 6, 1, 2, 3, 9], [1, 1, 2, 2, 2, 3], disable_grpo_std_normalization=True)
    assert rewards == [-3, 3, -1, 0, 1, 0]


@pytest.mark.parametrize("options", [{}, {"leave_one_out": True}, {"std_ddof": 0, "std_eps": 0.0}])
def test_group_of_one_gets_zero(options):
    assert transformed([0.7], [3], **options) == [0.0]


@pytest.mark.parametrize("options", [{}, {"leave_one_out": True}, {"std_ddof": 0, "std_eps": 0.0}])
def test_group_of_equal_rewards_gets_exactly_zero(options):
    assert transformed([0.1] * 7, [3] * 7, **options) == [0.0] * 7


def test_offset_of_all_rewards_changes_nothing():
    assert transformed([1e6 + 1, 1e6, 1e6], [0] * 3) == transformed([1, 0, 0], [0] * 3)


@given(
    case=st.lists(
        st.tuples(st.floats(-1000, 1000, width=32), st.integers(-2, 3).map(lambda i: i * 10**15)),
        min_size=1,
        max_size=20,
    ),
    ddof=st.sampled_from([0, 1]),
)
def test_random_groups_equal_a_slow_loop(case, ddof):
    rewards, groups = [r for r, _ in case], [g for _, g in case]
    expected = []
    for reward, group in case:
        members = [r for r, g in case if g == group]
        deviation = (
            0.0 if len(members) <= ddof else (statistics.stdev if ddof else statistics.pstdev)(members)
        )
        expected.append((reward - statistics.fmean(members)) / (deviation + 1e-6))
    assert transformed(rewards, groups, std_ddof=ddof) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_result_is_new_and_double():
    rewards = np.array([1.0, 2.0], dtype=np.float64)
    for transform in (raw, group_norm):
        result = transform(rewards, np.array([0, 0]))
        assert result.dtype == np.float64
        assert not np.shares_memory(result, rewards)
    assert rewards.tolist() == [1.0, 2.0]


def test_raw_leaves_rewards_as_they_are():
    assert raw(np.array([1, -2.5], dtype=np.float32), np.array([0, 0])).tolist() == [1.0, -2.5]


def test_other_degrees_of_freedom_are_refused():
    with pytest.raises(ValueError, match="std_ddof is 2"):
        transformed([1, 2], [0, 0], std_ddof=2)


def test_rewards_and_ids_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"\(2,\) rewards for \(3,\) group ids"):
        transformed([1, 2], [0, 0, 0])


def test_standard_deviation_of_the_step_is_one_for_all_groups():
    # centred by group: -1, 1, -3, 3; the variance of 0, 2, 4, 10 around 4 is 56/3
    scale = (56 / 3) ** 0.5
    expected = [-1 / scale, 1 / scale, -3 / scale, 3 / scale]
    assert transformed([0, 2, 4, 10], [0, 0, 1, 1], std_over_batch=True, std_eps=0.0) == pytest.approx(
        expected
    )
