"""The optimal token baseline, by hand."""

import dataclasses
import math

import pytest
import torch
from slime_algos.advantages.optimal_token_baseline import optimal_token_baseline
from slime_algos.testing import view_of

from ..estimators import grouped


def probable(masks, rewards, groups, likely, squares):
    """A view by the probability of each token, and the sum of its distribution's squared probabilities."""
    return view_of(
        masks,
        rewards=rewards,
        group_ids=torch.tensor(groups),
        old_log_probs=[[math.log(p) for p in row] for row in likely],
        sum_pi_squared=squares,
    )


def test_the_token_baseline_is_weighed_by_the_squared_gradients_so_far():
    # 1 - 2p + s is 1/2, 1/2 and 1/4, 3/4, which add up to 1/2, 1 and 1/4, 1. Baselines of the two places:
    # (1/2 · 6 + 1/4 · 0) / (3/4) = 4, and (1 · 6 + 1 · 0) / 2 = 3
    view = probable(
        [[1, 1], [1, 1]], [6.0, 0.0], [3, 3],
        [[0.5, 0.5], [0.5, 0.25]], [[0.5, 0.5], [0.25, 0.25]],
    )  # fmt: skip
    advantages, returns = optimal_token_baseline(view)
    assert advantages.tolist() == pytest.approx([2.0, 3.0, -4.0, -3.0])
    assert returns.tolist() == [6.0, 6.0, 0.0, 0.0]


def test_the_token_baseline_counts_trained_tokens_and_is_0_where_a_sample_is_alone():
    half = ([[0.5] * 4, [0.5] * 2, [0.5]], [[0.5] * 4, [0.5] * 2, [0.5]])
    view = probable([[1, 0, 1, 1], [1, 1], [1]], [6.0, 0.0, 7.0], [0, 0, 1], *half)
    # first and second trained token of both: mean 3; the third has no peer; the last sample is alone in its group
    assert optimal_token_baseline(view)[0].tolist() == pytest.approx([3.0, 0.0, 3.0, 6.0, -3.0, -3.0, 7.0])


def test_importance_weights_count_twice_in_the_token_baseline():
    # squared gradients 1/2 and 1/4; ratios e and 1, so 1/2 · 4 (clipped at 2) and 1/4: (2 · 6 + 0) / (9/4) = 16/3
    view = probable([[1], [1]], [6.0, 0.0], [3, 3], [[0.5], [0.5]], [[0.5], [0.25]])
    engine = view.old_log_probs - torch.tensor([1.0, 0.0])
    weighed = dataclasses.replace(view, rollout_log_probs=engine)
    advantages, *_ = optimal_token_baseline(weighed, use_tis=True, tis_clip=2.0)
    assert advantages.tolist() == pytest.approx([6 - 16 / 3, -16 / 3])


def test_equal_rewards_have_a_token_baseline_of_exactly_the_reward():
    view = grouped(5)
    equal = dataclasses.replace(
        view, loss_mask=torch.ones_like(view.loss_mask), rewards=torch.full_like(view.rewards, 0.1)
    )
    advantages, _ = optimal_token_baseline(equal)
    assert set(advantages.tolist()) <= {0.0, 0.1}
