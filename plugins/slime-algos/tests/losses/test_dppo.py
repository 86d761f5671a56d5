"""The loss `dppo`."""

import pytest
import torch
from slime_algos.losses.dppo import dppo_loss
from slime_algos.testing import view_of


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_drops_tokens_that_are_pushed_further_out(divergence):
    # Probabilities from 0.2 to 0.6, pushed up and pushed back; from 0.5 to 0.52; from 0.6 to 0.2, pushed down.
    # Total variation 0.4, 0.4, 0.02, 0.4; KL 0.33, 0.33, 8e-4, 0.38.
    old = torch.tensor([0.2, 0.2, 0.5, 0.6], dtype=torch.float64)
    new = torch.tensor([0.6, 0.6, 0.52, 0.2], dtype=torch.float64)
    log_probs = new.log().requires_grad_()
    view = view_of([[1, 1, 1, 1]], log_probs=log_probs, old_log_probs=old.log())
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    loss, metrics = dppo_loss(
        view, advantages, eps_clip=0.3, dppo_divergence=divergence, dppo_ratio_limit=2.0
    )
    loss.backward()
    assert metrics["pg_clipfrac"].item() == 0.5
    assert log_probs.grad.tolist() == pytest.approx([0, 2 / 4, -1.04 / 4, 0])  # ratio 3 is held at 2
