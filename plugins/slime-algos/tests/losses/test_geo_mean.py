"""The loss `geo_mean`."""

import math

import pytest
import torch
from slime_algos.losses.geo_mean import geo_mean_loss
from slime_algos.testing import view_of


def test_geo_mean_clips_tokens_and_then_takes_the_mean():
    # log-ratios 1 and -0.1 clipped to [-0.4, 0.4]: mean (0.4 - 0.1)/2
    view = view_of([[1, 1]], log_probs=[[1.0, -0.1]])
    loss, metrics = geo_mean_loss(view, torch.full((2,), 2.0, dtype=torch.float64), eps_clip=0.4)
    assert loss.item() == pytest.approx(-2 * math.exp(0.15))
    assert metrics["pg_clipfrac"].item() == 0.5
