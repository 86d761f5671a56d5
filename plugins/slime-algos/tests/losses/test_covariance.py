"""KL-Cov and Clip-Cov, by hand."""

import math

import pytest
import torch
from slime_algos.losses.covariance import clip_cov_loss, kl_cov_loss
from slime_algos.testing import view_of


def test_kl_cov_penalises_the_token_of_highest_covariance():
    # covariances (A - 0)(logπ + 2): 1·1, -1·0, 0·-1; loss -ρA = -e^0.5·1, +1, 0, and 0.5 for the first
    view = view_of([[1, 1, 1]], log_probs=[[-1.0, -2.0, -3.0]], old_log_probs=[[-1.5, -2.0, -3.0]])
    advantages = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    loss, metrics = kl_cov_loss(view, advantages, kl_cov_ratio=0.34)
    assert loss.item() == pytest.approx((-math.exp(0.5) + 1 + 0.5) / 3)
    assert metrics["cov_clipfrac"].item() == pytest.approx(1 / 3)


def test_clip_cov_takes_the_loss_of_few_tokens_away():
    # covariances 6, 1.5, 1.5 and 0 around the mean log-prob -2.25: the first is above the bound, two qualify, one goes
    view = view_of(
        [[1, 1, 1, 1]], log_probs=[[0.0, -3.0, -3.0, -3.0]], old_log_probs=[[0.0, -3.0, -3.0, -3.0]]
    )
    advantages = torch.tensor([2.0, -2.0, -2.0, 0.0], dtype=torch.float64)
    loss, metrics = clip_cov_loss(view, advantages, clip_cov_low=1.0, clip_cov_high=5.0)
    assert metrics["cov_clipfrac"].item() == 0.25
    assert loss.item() == pytest.approx((-2.0 + 0 + 2.0 + 0) / 4)
