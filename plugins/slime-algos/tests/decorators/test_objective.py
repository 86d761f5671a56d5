"""What every policy loss has besides its own objective: KL, off-policy masking, options."""

import inspect
import math

import pytest
import torch
from slime_algos.decorators.objective import policy_objective
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.sapo import sapo_loss
from slime_algos.testing import random_view, view_of
from slime_core.protocols import needs_of

from ..losses_by_name import KL


def test_straight_through_kl_has_the_value_of_its_estimator_and_the_gradient_of_k2():
    view = random_view(3)
    zeros = torch.zeros_like(view.loss_mask)
    options = KL | {"kl_loss_coef": 1.0, "kl_loss_type": "k3"}
    value, _ = policy_loss(view, zeros, **options)
    through, _ = policy_loss(view, zeros, **options, kl_straight_through=True)
    k2, _ = policy_loss(view, zeros, **options | {"kl_loss_type": "k2"})
    assert through.item() == pytest.approx(value.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss, view.log_probs)[0].tolist() for loss in (through, k2)]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-12)


def test_unbiased_kl_has_the_gradient_of_the_divergence_off_policy():
    # Over two outcomes drawn from π_old, the expectation of (π/π_old)·k3 and its gradient are the divergence's.
    old = torch.tensor([0.3, 0.7], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.5], dtype=torch.float64)
    logit = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    policy = torch.stack([torch.sigmoid(logit), 1 - torch.sigmoid(logit)])
    divergence = (policy * (policy / reference).log()).sum()
    (wanted,) = torch.autograd.grad(divergence, logit, retain_graph=True)
    view = view_of(
        [[1, 1]],
        weights=old,  # the chance of each outcome
        log_probs=policy.log(),
        old_log_probs=old.log(),
        ref_log_probs=reference.log(),
    )
    loss, metrics = policy_loss(
        view,
        torch.zeros(2, dtype=torch.float64),
        use_kl_loss=True,
        kl_loss_coef=1.0,
        kl_loss_type="k3",
        use_unbiased_kl=True,
    )
    (gradient,) = torch.autograd.grad(loss, logit)
    assert metrics["kl_loss"].item() == pytest.approx(divergence.item(), rel=1e-12)
    assert gradient.item() == pytest.approx(wanted.item(), rel=1e-12)


def test_opsm_drops_negative_samples_that_the_policy_left():
    # log π_old - log π: mean 0.2 in the first and second sample, 0 in the third
    view = view_of(
        [[1, 1], [1, 1], [1]],
        log_probs=[[-0.4, 0.0], [-0.4, 0.0], [0.0]],
    )
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    loss, metrics = policy_loss(view, advantages, eps_clip=0.9, use_opsm=True, opsm_delta=0.1)
    assert metrics["opsm_clipfrac"].item() == pytest.approx(2 / 5)
    assert loss.item() == pytest.approx((0 + 0 - math.exp(-0.4) - 1 + 1) / 5)


def test_an_objective_keeps_its_name_and_takes_the_common_options():
    signature = inspect.signature(sapo_loss)
    assert sapo_loss.__name__ == "sapo_loss"
    assert list(signature.parameters)[:2] == ["view", "advantages"]
    assert {"sapo_tau_pos", "entropy_coef", "use_kl_loss", "use_opsm"} <= set(signature.parameters)
    assert needs_of(sapo_loss, {"use_opsm": True, "entropy_coef": 1}) == {"old_log_probs", "entropy"}


def test_an_objective_with_an_option_of_all_losses_is_refused():
    def greedy(view, log_ratio, advantages, *, entropy_coef=1.0):
        return log_ratio, {}

    with pytest.raises(TypeError, match="takes entropy_coef itself"):
        policy_objective(greedy)
