"""The loss `cispo`."""

import pytest
import torch
from slime_algos.losses.cispo import cispo_loss
from slime_algos.testing import random_view

from ..losses_by_name import credits


def test_cispo_has_the_gradient_of_a_weighted_policy_gradient():
    view = random_view(2)
    advantages = credits(view)
    loss, _ = cispo_loss(view, advantages, eps_clip=0.2, eps_clip_high=0.3)
    (gradient,) = torch.autograd.grad(loss, view.log_probs)
    clipped = (view.log_probs - view.old_log_probs).exp().clamp(0.8, 1.3)
    assert gradient.tolist() == pytest.approx((-view.weights * clipped * advantages).tolist(), rel=1e-12)
