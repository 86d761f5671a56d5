from __future__ import annotations

import math

import torch
from slime_algos.losses.sft import sft_loss
from slime_core.protocols import TokenView


def view(log_probs, mask, weights):
    return TokenView(
        offsets=torch.tensor([0, 2, 4]),
        sample_of_token=torch.tensor([0, 0, 1, 1]),
        loss_mask=torch.tensor(mask),
        weights=torch.tensor(weights),
        rewards=torch.zeros(2),
        old_log_probs=None,
        log_probs=log_probs,
    )


def test_the_loss_is_the_weighted_cross_entropy_of_trained_tokens():
    log_probs = torch.tensor([-1.0, -math.inf, -2.0, -3.0], requires_grad=True)
    loss, metrics = sft_loss(view(log_probs, [1.0, 0.0, 1.0, 1.0], [0.5, 0.0, 0.25, 0.25]), None)
    assert loss.item() == 0.5 * 1 + 0.25 * 2 + 0.25 * 3
    loss.backward()
    assert log_probs.grad.tolist() == [-0.5, 0.0, -0.25, -0.25]
    assert metrics == {}
