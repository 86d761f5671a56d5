"""The GRPO estimator, and what the group normalisation before it makes of rewards."""

import numpy as np
import pytest
import torch
from slime_algos.advantages.grpo import grpo
from slime_core.protocols import TokenView, needs_of
from slime_core.rewards.transforms import group_norm


def view_of(rewards, lengths) -> TokenView:
    n = sum(lengths)
    return TokenView(
        offsets=torch.tensor(np.concatenate([[0], np.cumsum(lengths)])),
        sample_of_token=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        loss_mask=torch.ones(n),
        weights=torch.ones(n),
        rewards=torch.as_tensor(rewards, dtype=torch.float32),
        old_log_probs=torch.zeros(n),
    )


def test_every_token_gets_its_samples_reward():
    advantages, returns = grpo(view_of([0.5, -1.0, 2.0], [2, 1, 3]))
    assert advantages.tolist() == [0.5, 0.5, -1.0, 2.0, 2.0, 2.0]
    assert returns.tolist() == advantages.tolist()
    assert advantages.dtype == torch.float32


def test_advantages_of_right_wrong_wrong_right():
    # mean 1/2, unbiased variance 1/3: 0.5 / sqrt(1/3) = sqrt(3)/2
    rewards = group_norm(np.array([1.0, 0.0, 0.0, 1.0]), np.array([7, 7, 7, 7]))
    advantages, _ = grpo(view_of(rewards, [1, 1, 1, 1]))
    assert advantages.tolist() == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254], abs=2e-6)


def test_wants_group_normalised_rewards_and_nothing_else():
    assert grpo.reward_transform == "group-norm"
    assert needs_of(grpo, {}) == frozenset()
