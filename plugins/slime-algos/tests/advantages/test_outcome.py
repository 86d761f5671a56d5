"""Estimators that credit each token with its sample's reward."""

import pytest
import torch
from slime_algos.advantages.cispo import cispo
from slime_algos.advantages.gpg import gpg
from slime_algos.advantages.grpo import grpo
from slime_algos.advantages.grpo_passk import grpo_passk
from slime_algos.advantages.gspo import gspo
from slime_algos.advantages.multi_turn import multi_turn
from slime_algos.advantages.opo import opo
from slime_algos.advantages.optimal_token_baseline import optimal_token_baseline
from slime_algos.advantages.ppo import ppo
from slime_algos.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from slime_algos.advantages.rloo import rloo
from slime_algos.testing import view_of

from ..estimators import OUTCOME


@pytest.mark.parametrize("estimate", OUTCOME, ids=lambda estimate: estimate.__name__)
def test_each_token_gets_its_samples_reward(estimate):
    advantages, returns = estimate(view_of([[1, 1], [1], [1, 1, 1]], rewards=[0.5, -1.0, 2.0]))
    assert advantages.tolist() == [0.5, 0.5, -1.0, 2.0, 2.0, 2.0]
    assert returns.tolist() == advantages.tolist()


@pytest.mark.parametrize(
    ("estimate", "transform", "loss"),
    [
        (grpo, "group-norm", "policy_loss"),
        (gspo, "group-norm", "gspo_loss"),
        (cispo, "group-norm", "cispo_loss"),
        (multi_turn, "group-norm", "policy_loss"),
        (rloo, "leave-one-out", "policy_loss"),
        (gpg, "gpg", "policy_gradient_loss"),
        (grpo_passk, "pass-at-k", "policy_loss"),
        (opo, "raw", "policy_loss"),
        (optimal_token_baseline, "raw", "policy_loss"),
        (ppo, "raw", "policy_loss"),
        (reinforce_plus_plus, "raw", "policy_loss"),
        (reinforce_plus_plus_baseline, "group-centre", "policy_loss"),
    ],
)
def test_an_estimator_names_its_reward_transform_and_its_loss(estimate, transform, loss):
    assert (estimate.reward_transform, estimate.loss) == (transform, loss)


def test_a_token_answers_for_the_penalties_after_it():
    # k1 of each token: 1, 2, 4; the masked token pays nothing
    view = view_of(
        [[1, 1, 0, 1]],
        rewards=[10.0],
        old_log_probs=[[0.0] * 4],
        ref_log_probs=[[-1.0, -2.0, -torch.inf, -4.0]],
    )
    assert grpo(view, kl_coef=0.5)[0].tolist() == [6.5, 7.0, 8.0, 8.0]
    own, *_ = reinforce_plus_plus_baseline(view, kl_coef=0.5)
    assert own.tolist() == [9.5, 9.0, 10.0, 8.0]
