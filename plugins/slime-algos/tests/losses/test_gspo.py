"""The loss `gspo`."""

import math

import pytest
import torch
from slime_algos.losses.gspo import gspo_loss
from slime_algos.testing import view_of


def test_gspo_takes_the_geometric_mean_of_a_samples_ratios():
    # ratios 2 and 8, the third token an environment's: mean ratio 4, clipped to 1.2; and a sample of ratio 1
    view = view_of([[1, 1, 0], [1]], log_probs=[[math.log(2), math.log(8), 50.0], [0.0]])
    loss, metrics = gspo_loss(view, torch.ones(4, dtype=torch.float64))
    assert loss.item() == pytest.approx(-(1.2 + 1.2 + 1.0) / 3)
    assert metrics["pg_clipfrac"].item() == pytest.approx(2 / 3)
