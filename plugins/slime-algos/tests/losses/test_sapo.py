"""The loss `sapo`."""

import pytest
import torch
from slime_algos.losses.sapo import sapo_loss
from slime_algos.testing import view_of


def test_sapo_gate_of_equal_policies_is_two_over_tau():
    view = view_of([[1, 1]], log_probs=[[0.0, 0.0]])
    loss, _ = sapo_loss(
        view, torch.tensor([1.0, -1.0], dtype=torch.float64), sapo_tau_pos=1.0, sapo_tau_neg=2.0
    )
    assert loss.item() == pytest.approx((-2.0 + 1.0) / 2)
