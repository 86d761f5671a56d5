"""The clipped policy loss: by hand, against a slow loop, and its gradient against finite differences."""

import math

import pytest
import torch
from slime_algos.losses.policy import policy_loss
from slime_algos.terms.kl import KL_ESTIMATORS
from slime_core.errors import TrainerError
from slime_core.protocols import TokenView, needs_of


def view_of(**columns) -> TokenView:
    """Return a view of one sample whose tokens all weigh the same, but for the columns given."""
    tensors = {k: torch.as_tensor(v, dtype=torch.float64) for k, v in columns.items() if v is not None}
    n = len(tensors["log_probs"])
    mask = tensors.pop("loss_mask", torch.ones(n, dtype=torch.float64))
    return TokenView(
        offsets=torch.tensor([0, n]),
        sample_of_token=torch.zeros(n, dtype=torch.int64),
        loss_mask=mask,
        weights=tensors.pop("weights", mask / mask.sum()),
        rewards=torch.zeros(1),
        **tensors,
    )


def random_case(seed: int, n: int = 40):
    """Return (view, advantages) with ratios on both sides of every clip, none on a kink."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    log_probs = (-normal().abs()).requires_grad_()
    view = view_of(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() + normal(),
        ref_log_probs=log_probs.detach() + normal(),
        entropy=normal().abs(),
        loss_mask=(torch.rand(n, generator=generator) > 0.25).double(),
        weights=None,
    )
    return view, normal()


OPTIONS = {
    "defaults": {},
    "clip-higher": {"eps_clip": 0.2, "eps_clip_high": 0.5},
    "dual clip": {"eps_clip_c": 1.5},
    "kl k1": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k1"},
    "kl k2": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k2"},
    "kl k3": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"},
    "kl low_var": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl"},
    "entropy": {"entropy_coef": 0.1},
    "all": {
        "eps_clip_high": 0.3,
        "eps_clip_c": 2.0,
        "entropy_coef": -0.1,
        "use_kl_loss": True,
        "kl_loss_coef": 1.0,
    },
}


def slow_loss(view, advantages, o):
    """Return the loss and metrics, token by token in Python floats, by cases instead of by max and min."""
    low, high, c = o.get("eps_clip", 0.2), o.get("eps_clip_high"), o.get("eps_clip_c")
    high = low if high is None else high
    total = dict.fromkeys(("pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "kl_loss"), 0.0)
    for t in range(len(advantages)):
        w, a = view.weights[t].item(), advantages[t].item()
        if view.loss_mask[t] == 0:
            continue
        lp, old, ref = (x[t].item() for x in (view.log_probs, view.old_log_probs, view.ref_log_probs))
        ratio = math.exp(lp - old)
        clipped = False
        if a > 0 and ratio > 1 + high:
            ratio, clipped = 1 + high, True
        if a < 0 and ratio < 1 - low:
            ratio, clipped = 1 - low, True
        if a < 0 and c is not None and ratio > c:
            ratio = c
        x = lp - ref
        k3 = math.exp(-x) - 1 + x
        kl = {"k1": x, "k2": x * x / 2, "k3": k3, "low_var_kl": min(k3, 10.0)}[o.get("kl_loss_type", "k1")]
        total["pg_loss"] += w * -a * ratio
        total["pg_clipfrac"] += w * clipped
        total["ppo_kl"] += w * (old - lp)
        total["entropy_loss"] += w * view.entropy[t].item()
        total["kl_loss"] += w * kl
    loss = total["pg_loss"] - o.get("entropy_coef", 0) * total["entropy_loss"]
    if o.get("use_kl_loss"):
        loss += o.get("kl_loss_coef", 0) * total["kl_loss"]
    else:
        del total["kl_loss"]
    return loss, total


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "clipped"),
    [
        # max(-rho A, -clip(rho) A), worked out by hand
        (1.0, 2.0, {}, -2.0, 0.0),
        (1.5, 2.0, {}, -2.4, 1.0),  # -1.2 * 2
        (0.5, 2.0, {}, -1.0, 0.0),  # a falling ratio of a good token is not clipped
        (0.5, -2.0, {}, 1.6, 1.0),  # 0.8 * 2
        (1.5, -2.0, {}, 3.0, 0.0),
        (1.5, 2.0, {"eps_clip_high": 0.28}, -2.56, 1.0),  # -1.28 * 2
        (0.75, -2.0, {"eps_clip": 0.3, "eps_clip_high": 0.1}, 1.5, 0.0),
        (5.0, -2.0, {}, 10.0, 0.0),
        (5.0, -2.0, {"eps_clip_c": 3.0}, 6.0, 0.0),  # dual clip: at most 3 * 2
        (5.0, 2.0, {"eps_clip_c": 3.0}, -2.4, 1.0),  # dual clip leaves good tokens alone
    ],
)
def test_loss_of_one_token_is_what_the_formula_gives(ratio, advantage, options, loss, clipped):
    view = view_of(log_probs=[math.log(ratio) - 1], old_log_probs=[-1.0])
    value, metrics = policy_loss(view, torch.tensor([advantage], dtype=torch.float64), **options)
    assert value.item() == pytest.approx(loss)
    assert metrics["pg_loss"].item() == pytest.approx(loss)
    assert metrics["pg_clipfrac"].item() == clipped
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_metrics_equal_a_slow_loop(name, seed):
    view, advantages = random_case(seed)
    loss, metrics = policy_loss(view, advantages, **OPTIONS[name])
    slow, slow_metrics = slow_loss(view, advantages, OPTIONS[name])
    assert loss.item() == pytest.approx(slow, rel=1e-12)
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(slow_metrics, rel=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_equals_finite_differences(name):
    view, advantages = random_case(seed=11)
    loss, _ = policy_loss(view, advantages, **OPTIONS[name])
    (gradient,) = torch.autograd.grad(loss, view.log_probs)
    h = 1e-6
    for t in range(len(advantages)):
        values = []
        for step in (h, -h):
            moved = view.log_probs.detach().clone()
            moved[t] += step
            values.append(
                slow_loss(TokenView(**(vars(view) | {"log_probs": moved})), advantages, OPTIONS[name])[0]
            )
        assert gradient[t].item() == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-6, abs=1e-8)


def test_gradient_at_the_old_policy_is_that_of_reinforce():
    # d/dlogπ of −ρA at ρ = 1 is −A, times the weight 1/3
    log_probs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    view = view_of(log_probs=log_probs, old_log_probs=log_probs.detach())
    loss, _ = policy_loss(view, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([-1 / 3, 2 / 3, -0.5 / 3])


def test_clipped_tokens_have_no_gradient():
    log_probs = torch.tensor(
        [math.log(1.5), math.log(0.5), math.log(9.0)], dtype=torch.float64, requires_grad=True
    )
    view = view_of(log_probs=log_probs, old_log_probs=[0.0, 0.0, 0.0])
    loss, _ = policy_loss(view, torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64), eps_clip_c=3.0)
    loss.backward()
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]


def test_shares_of_micro_batches_add_up():
    view, advantages = random_case(seed=5, n=60)
    options = OPTIONS["all"]
    whole, _ = policy_loss(view, advantages, **options)
    parts = []
    for part in (slice(0, 7), slice(7, 40), slice(40, 60)):
        tokens = {k: v[part] for k, v in vars(view).items() if isinstance(v, torch.Tensor) and len(v) == 60}
        parts.append(policy_loss(TokenView(**(vars(view) | tokens)), advantages[part], **options)[0])
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-12)


def test_coefficient_zero_only_reports_the_kl():
    view, advantages = random_case(seed=2)
    plain, _ = policy_loss(view, advantages)
    watched, metrics = policy_loss(view, advantages, use_kl_loss=True)
    assert watched.item() == plain.item()
    assert metrics["kl_loss"].item() != 0
    assert not metrics["kl_loss"].requires_grad


def test_metrics_carry_no_gradient():
    view, advantages = random_case(seed=2)
    _, metrics = policy_loss(view, advantages, **OPTIONS["all"])
    assert set(metrics) == {"pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "kl_loss"}
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_impossible_tokens_that_are_masked_do_no_harm(kind):
    # an environment wrote the second token, the policy holds it impossible
    log_probs = torch.tensor([-1.0, -300.0], requires_grad=True)
    view = TokenView(
        offsets=torch.tensor([0, 2]),
        sample_of_token=torch.tensor([0, 0]),
        loss_mask=torch.tensor([1.0, 0.0]),
        weights=torch.tensor([1.0, 0.0]),
        rewards=torch.zeros(1),
        old_log_probs=torch.tensor([-1.0, 0.0]),
        log_probs=log_probs,
        ref_log_probs=torch.tensor([-1.0, 0.0]),
    )
    loss, metrics = policy_loss(
        view, torch.tensor([1.0, -1.0]), use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind
    )
    loss.backward()
    assert loss.item() == -1.0
    assert metrics["ppo_kl"].item() == 0.0
    assert log_probs.grad[1].item() == 0.0
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-1000.0, -100.0, 100.0, 1000.0])
def test_extreme_ratios_give_a_finite_loss_and_gradient(advantage, log_ratio):
    log_probs = torch.tensor([log_ratio], requires_grad=True)
    view = TokenView(
        offsets=torch.tensor([0, 1]),
        sample_of_token=torch.tensor([0]),
        loss_mask=torch.ones(1),
        weights=torch.ones(1),
        rewards=torch.zeros(1),
        old_log_probs=torch.zeros(1),
        log_probs=log_probs,
    )
    loss, _ = policy_loss(view, torch.tensor([advantage]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, set()),
        ({"entropy_coef": 0.0, "use_kl_loss": False}, set()),
        ({"entropy_coef": 0.01}, {"entropy"}),
        ({"use_kl_loss": True}, {"ref_log_probs"}),
        ({"entropy_coef": -0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}, {"entropy", "ref_log_probs"}),
    ],
)
def test_needs_follow_the_options(options, needs):
    assert needs_of(policy_loss, options) == needs


@pytest.mark.parametrize(
    ("options", "missing"), [({"entropy_coef": 0.1}, "entropy"), ({"use_kl_loss": True}, "ref_log_probs")]
)
def test_field_that_the_trainer_left_empty_is_named(options, missing):
    view = view_of(log_probs=[-1.0], old_log_probs=[-1.0])
    with pytest.raises(TrainerError, match=f"TokenView has no {missing}"):
        policy_loss(view, torch.ones(1), **options)
