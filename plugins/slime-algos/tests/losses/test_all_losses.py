"""Every policy loss: gradients against finite differences, masks, and shares."""

import math

import pytest
import torch
from slime_algos.losses.cispo import cispo_loss
from slime_algos.losses.covariance import clip_cov_loss, kl_cov_loss
from slime_algos.losses.dppo import dppo_loss
from slime_algos.losses.dro import dro_loss
from slime_algos.losses.geo_mean import geo_mean_loss
from slime_algos.losses.gspo import gspo_loss
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.policy_gradient import policy_gradient_loss
from slime_algos.losses.sapo import sapo_loss
from slime_algos.terms.kl import KL_ESTIMATORS
from slime_algos.testing import random_view, view_of
from slime_core.protocols import TokenView

from ..losses_by_name import KL, credits

# Left out: losses with a stopped gradient (`cispo_loss`, `dppo_loss`, straight-through KL) have tests of their own.
DIFFERENTIABLE = {
    "policy_loss": (policy_loss, {}),
    "policy_loss, dual clip": (policy_loss, {"eps_clip_high": 0.3, "eps_clip_c": 1.5}),
    "policy_loss, unbiased KL": (policy_loss, KL | {"kl_loss_type": "k3", "use_unbiased_kl": True}),
    "policy_loss, OPSM": (policy_loss, {"use_opsm": True, "opsm_delta": 0.05}),
    "gspo_loss": (gspo_loss, {"eps_clip_high": 0.3}),
    "gspo_loss, dual clip": (gspo_loss, {"eps_clip": 0.05, "eps_clip_c": 1.1}),
    "sapo_loss": (sapo_loss, {"sapo_tau_neg": 2.0}),
    "geo_mean_loss": (geo_mean_loss, {"eps_clip": 0.1}),
    "policy_gradient_loss": (policy_gradient_loss, {}),
    "dro_loss": (dro_loss, {"dro_beta": 0.5}),
    "clip_cov_loss": (clip_cov_loss, {"clip_cov_ratio": 0.1, "clip_cov_low": 0.2}),
    "kl_cov_loss": (kl_cov_loss, {"kl_cov_ratio": 0.1}),
} | {f"KL {kind}": (policy_loss, KL | {"kl_loss_type": kind}) for kind in KL_ESTIMATORS}


LOSSES = [
    policy_loss,
    gspo_loss,
    cispo_loss,
    sapo_loss,
    geo_mean_loss,
    policy_gradient_loss,
    clip_cov_loss,
    kl_cov_loss,
    dppo_loss,
    dro_loss,
]


def moved(view: TokenView, log_probs: torch.Tensor) -> TokenView:
    return TokenView(**(vars(view) | {"log_probs": log_probs}))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_equals_finite_differences(name, seed):
    loss, options = DIFFERENTIABLE[name]
    view = random_view(seed)
    advantages = credits(view, seed)
    assert torch.autograd.gradcheck(
        lambda log_probs: loss(moved(view, log_probs), advantages, **options)[0], view.log_probs, atol=1e-7
    )


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_fully_masked_micro_batch_gives_zero_and_no_gradient(loss):
    log_probs = torch.tensor([-torch.inf, -5.0], dtype=torch.float64, requires_grad=True)
    view = view_of([[0], [0]], log_probs=log_probs, old_log_probs=[[0.0], [0.0]])
    value, metrics = loss(view, torch.ones(2, dtype=torch.float64))
    value.backward()
    assert value.item() == 0.0
    assert log_probs.grad.tolist() == [0.0, 0.0]
    assert all(math.isfinite(metric) for metric in metrics.values())


@pytest.mark.parametrize("loss", [policy_loss, gspo_loss, cispo_loss, sapo_loss, geo_mean_loss, policy_gradient_loss],
                         ids=lambda loss: loss.__name__)  # fmt: skip
def test_shares_of_samples_add_up_to_the_whole(loss):
    view = random_view(4)
    advantages = credits(view)
    parts = 0.0
    for i in range(len(view.rewards)):
        tokens = slice(int(view.offsets[i]), int(view.offsets[i + 1]))
        own = view_of(
            [view.loss_mask[tokens].tolist()],
            weights=view.weights[tokens],
            log_probs=view.log_probs[tokens],
            old_log_probs=view.old_log_probs[tokens],
        )
        parts += loss(own, advantages[tokens])[0].item()
    assert parts == pytest.approx(loss(view, advantages)[0].item(), rel=1e-12)
