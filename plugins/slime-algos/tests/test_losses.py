"""Every policy loss: gradients against finite differences, and its own formula on a few tokens by hand."""

import inspect
import math

import pytest
import torch
from slime_algos.kl import KL_ESTIMATORS
from slime_algos.losses.cispo import cispo_loss
from slime_algos.losses.covariance import clip_cov_loss, kl_cov_loss
from slime_algos.losses.dppo import dppo_loss
from slime_algos.losses.dro import dro_loss
from slime_algos.losses.geo_mean import geo_mean_loss
from slime_algos.losses.gspo import gspo_loss
from slime_algos.losses.policy import policy_loss
from slime_algos.losses.policy_gradient import policy_gradient_loss
from slime_algos.losses.sapo import sapo_loss
from slime_algos.objective import policy_objective
from slime_algos.testing import random_view, view_of
from slime_core.protocols import TokenView, needs_of

KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
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


def credits(view: TokenView, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(view.loss_mask), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_equals_finite_differences(name, seed):
    loss, options = DIFFERENTIABLE[name]
    view = random_view(seed)
    advantages = credits(view, seed)
    assert torch.autograd.gradcheck(
        lambda log_probs: loss(moved(view, log_probs), advantages, **options)[0], view.log_probs, atol=1e-7
    )


def test_cispo_has_the_gradient_of_a_weighted_policy_gradient():
    view = random_view(2)
    advantages = credits(view)
    loss, _ = cispo_loss(view, advantages, eps_clip=0.2, eps_clip_high=0.3)
    (gradient,) = torch.autograd.grad(loss, view.log_probs)
    clipped = (view.log_probs - view.old_log_probs).exp().clamp(0.8, 1.3)
    assert gradient.tolist() == pytest.approx((-view.weights * clipped * advantages).tolist(), rel=1e-12)


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


def test_gspo_takes_the_geometric_mean_of_a_samples_ratios():
    # ratios 2 and 8, the third token an environment's: mean ratio 4, clipped to 1.2; and a sample of ratio 1
    view = view_of([[1, 1, 0], [1]], log_probs=[[math.log(2), math.log(8), 50.0], [0.0]])
    loss, metrics = gspo_loss(view, torch.ones(4, dtype=torch.float64))
    assert loss.item() == pytest.approx(-(1.2 + 1.2 + 1.0) / 3)
    assert metrics["pg_clipfrac"].item() == pytest.approx(2 / 3)


def test_geo_mean_clips_tokens_and_then_takes_the_mean():
    # log-ratios 1 and -0.1 clipped to [-0.4, 0.4]: mean (0.4 - 0.1)/2
    view = view_of([[1, 1]], log_probs=[[1.0, -0.1]])
    loss, metrics = geo_mean_loss(view, torch.full((2,), 2.0, dtype=torch.float64), eps_clip=0.4)
    assert loss.item() == pytest.approx(-2 * math.exp(0.15))
    assert metrics["pg_clipfrac"].item() == 0.5


def test_sapo_gate_of_equal_policies_is_two_over_tau():
    view = view_of([[1, 1]], log_probs=[[0.0, 0.0]])
    loss, _ = sapo_loss(
        view, torch.tensor([1.0, -1.0], dtype=torch.float64), sapo_tau_pos=1.0, sapo_tau_neg=2.0
    )
    assert loss.item() == pytest.approx((-2.0 + 1.0) / 2)


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
