"""Finite losses and gradients, whatever the ratios; and columns that may hold anything where nothing is trained on."""

import inspect
import itertools
from dataclasses import fields, replace
from importlib.metadata import entry_points

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_algos.greedy_baseline import IS_BASELINE
from slime_algos.terms.correction import importance_weights, kept
from slime_algos.terms.kl import KL_ESTIMATORS
from slime_algos.testing import corrected, random_view, view_of
from slime_core.protocols.correction import Correction


def plugins_of(group):
    ours = [plugin for plugin in entry_points(group=group) if plugin.value.startswith("slime_algos.")]
    return {plugin.name: plugin.load() for plugin in ours}


LOSSES, ESTIMATORS = plugins_of("slime.losses"), plugins_of("slime.advantages")
VARIANTS = {
    "policy_loss": [{}, {"eps_clip_c": 3.0}, {"use_opsm": True}],
    "gspo_loss": [{}, {"eps_clip_c": 3.0}],
    "dppo_loss": [{}, {"dppo_divergence": "kl"}],
    "value_loss": [{}, {"value_clip": None}, {"value_clipfrac": "larger"}],
}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5, "entropy_coef": 0.1}
KL_OPTIONS = [
    KL | {"kl_loss_type": kind, "use_unbiased_kl": unbiased, "kl_straight_through": straight}
    for kind, unbiased, straight in itertools.product(KL_ESTIMATORS, (False, True), (False, True))
]
CORRECTIONS = [
    {"level": level, "mode": mode, "low": 0.0, "high": high, "batch_normalize": normal}
    for level, mode, high, normal in itertools.product(
        ("token", "sequence", "geometric"), ("clip", "mask"), (2.0, float("inf")), (False, True)
    )
]
EXTREMES = (0.0, 90.0, -90.0, 1e4, -1e4, 20.0, -20.0, 1e-8)
DTYPES = (torch.float32, torch.bfloat16)


def options_of(loss, name):
    takes_kl = "use_kl_loss" in inspect.signature(loss).parameters
    return [*VARIANTS.get(name, [{}]), *(KL_OPTIONS if takes_kl else [])]


def extreme_view(masks, gaps, dtype):
    """Return a view whose log-ratios against every other policy go through `gaps`, from both sides of 0."""
    tokens = sum(len(mask) for mask in masks)
    picked = torch.tensor([gaps[i % len(gaps)] for i in range(tokens)], dtype=torch.float64)
    # The likelier of the two is at probability 1, as near as a log-prob comes.
    log_probs, other = picked.clamp(max=0), (-picked).clamp(max=0)
    columns = dict.fromkeys(
        ("old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs"), other
    )
    columns["rollout_log_probs"] = other.flip(0)
    view = view_of(
        masks, log_probs=log_probs, entropy=picked.abs(), values=picked, new_values=-picked,
        sum_pi_squared=other.exp(), rewards=[1e4, -1.0, 0.0, 1.0][: len(masks)] * (len(masks) > 0), **columns,
    )  # fmt: skip
    cast = {
        field.name: value.to(dtype)
        for field in fields(view)
        if isinstance(value := getattr(view, field.name), torch.Tensor) and value.is_floating_point()
    }
    view = replace(view, **cast)
    for name in ("log_probs", "new_values"):
        getattr(view, name).requires_grad_()
    return view


def gradients(value, view):
    wanted = [view.log_probs, view.new_values]
    return [
        torch.zeros_like(x) if g is None else g
        for x, g in zip(wanted, torch.autograd.grad(value, wanted, allow_unused=True), strict=True)
    ]


MASKS = {
    "ragged": [[1, 1, 0, 1, 1], [1], [0, 1, 1], [0, 0]],
    "one token": [[1]],
    "nothing trained": [[0, 0], [0]],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_finite_at_extreme_ratios(name, dtype):
    loss = LOSSES[name]
    for masks, options in itertools.product(MASKS.values(), options_of(loss, name)):
        for shift, size in itertools.product(range(len(EXTREMES)), (0.0, 1.0, -1.0, 1e6)):
            if "use_kl_loss" in options and (size != 1.0 or shift % 4):
                continue  # KL is added to every objective alike
            view = extreme_view(masks, EXTREMES[shift:] + EXTREMES[:shift], dtype)
            n = len(view.loss_mask)
            signs = torch.tensor([(-1.0) ** (i // 2) for i in range(n)], dtype=dtype)
            view = replace(view, importance=view.old_log_probs.clamp(min=0, max=5))
            value, metrics = loss(view, size * signs, **options)
            assert torch.isfinite(value), options
            assert all(torch.isfinite(torch.as_tensor(metric)) for metric in metrics.values()), (
                options,
                metrics,
            )
            if value.requires_grad:
                assert all(torch.isfinite(g).all() for g in gradients(value, view)), options


@settings(max_examples=60, derandomize=True)
@given(
    gaps=st.lists(st.one_of(st.sampled_from(EXTREMES), st.floats(-1e4, 1e4)), min_size=1, max_size=3),
    size=st.one_of(st.sampled_from((1.0, -1.0)), st.floats(-1e6, 1e6)),
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
)
def test_every_loss_is_finite_at_any_ratio(gaps, size, masks, dtype):
    view = extreme_view(masks, gaps, dtype)
    advantages = torch.full_like(view.loss_mask, size)
    for name, loss in LOSSES.items():
        for options in VARIANTS.get(name, [{}]):
            value, _ = loss(view, advantages, **options)
            assert torch.isfinite(value), (name, options)
            if value.requires_grad:
                assert all(torch.isfinite(g).all() for g in gradients(value, view)), (name, options)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kl_estimate_is_finite_with_its_gradient(kind, dtype):
    x = torch.tensor(EXTREMES, dtype=dtype, requires_grad=True)
    kl = KL_ESTIMATORS[kind](x)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_every_correction_is_finite(masks, dtype):
    for shift in range(len(EXTREMES)):
        view = extreme_view(masks, EXTREMES[shift:] + EXTREMES[:shift], dtype)
        for options in CORRECTIONS:
            weights, metrics = importance_weights(view, **options)
            assert torch.isfinite(weights).all(), options
            assert all(torch.isfinite(value) for value in metrics.values()), options
        for level in ("token", "sequence", "geometric"):
            _, metrics = kept(view, level=level, low=0.5, high=2.0, veto=1e-4)
            assert torch.isfinite(metrics["rs_rejected"])


def estimated(name, view, **options):
    n = len(view.rewards)
    view = replace(
        view,
        group_ids=torch.arange(n) // 2,
        reward_parts={"part": view.rewards},
        train_metadata=[{IS_BASELINE: i % 2 == 0} for i in range(n)],
    )
    if name == "gdpo":
        options["gdpo_weights"] = {"part": 1.0}
    return ESTIMATORS[name](view, **options)


ESTIMATOR_OPTIONS = [
    {},
    {"normalize_advantages": True},
    {"use_opd": True},
    {"use_tis": True, "tis_clip": float("inf"), "normalize_advantages": True},
    {"use_rs": True, "normalize_advantages": True, "rs_count_rejected": False},
    *({"kl_coef": 0.1, "kl_loss_type": kind} for kind in KL_ESTIMATORS),
    {"kl_coef": 0.1, "kl_target": 0.1, "kl_loss_type": "k3", "normalize_advantages": True},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_finite_at_extreme_ratios(name, dtype):
    for masks, options in itertools.product(MASKS.values(), ESTIMATOR_OPTIONS):
        view = extreme_view(masks, EXTREMES, dtype)
        advantages, returns, *_ = estimated(name, view, **options)
        assert torch.isfinite(advantages).all(), options
        assert torch.isfinite(returns).all(), options


#: Every column [T] but the mask.
COLUMNS = [
    "weights", "old_log_probs", "log_probs", "entropy", "rollout_log_probs", "ref_log_probs", "teacher_log_probs",
    "sum_pi_squared", "values", "new_values", "importance", "staleness",
]  # fmt: skip
ANYTHING = (float("nan"), float("inf"), -float("inf"), 1e30)


def spoilt(view, what):
    """Return the view with something else at its masked tokens."""
    masked = view.loss_mask == 0
    columns = {}
    for name in COLUMNS:
        column = getattr(view, name).detach().clone()
        column[masked] = what if column.is_floating_point() else 10**9
        columns[name] = column.requires_grad_(name in ("log_probs", "new_values"))
    return replace(view, **columns)


def test_every_column_of_a_view_is_spoilt():
    view = random_view(1)
    per_token = {f.name for f in fields(view) if f.name not in ("offsets", "sample_of_token", "loss_mask")}
    others = {"rewards", "group_ids", "reward_parts", "train_metadata", "total_lengths"}
    others |= {"logits", "tokens", "sequence_logits", "sequence_tokens"}  # which no loss of ours reads
    assert per_token - others == set(COLUMNS)


@pytest.mark.parametrize("what", ANYTHING)
@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_change_neither_loss_nor_gradient_nor_metrics(name, what):
    loss = LOSSES[name]
    view = random_view(6)
    view = replace(view, importance=(view.old_log_probs - view.rollout_log_probs).exp().clamp(max=1.2))
    advantages = torch.linspace(-2, 2, len(view.loss_mask), dtype=torch.float64)
    dirty = advantages.clone()
    dirty[view.loss_mask == 0] = what
    for options in options_of(loss, name):
        other = spoilt(view, what)
        value, metrics = loss(view, advantages, **options)
        again, metrics_again = loss(other, dirty, **options)
        assert again.item() == value.item(), options
        assert {k: float(v) for k, v in metrics_again.items()} == {k: float(v) for k, v in metrics.items()}
        for one, two in zip(gradients(value, view), gradients(again, other), strict=True):
            assert torch.equal(one, two), options


@pytest.mark.parametrize("what", ANYTHING)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_tokens_change_no_credit_of_others(name, what):
    view = random_view(7)
    view = replace(view, importance=torch.ones_like(view.loss_mask))
    trained = view.loss_mask > 0
    for options in ESTIMATOR_OPTIONS:
        clean, dirty = estimated(name, view, **options), estimated(name, spoilt(view, what), **options)
        for one, two in zip(clean[:2], dirty[:2], strict=True):
            assert torch.equal(one[trained], two[trained]), options
            assert torch.isfinite(two).all(), options
        for one, two in zip(clean[2:4], dirty[2:4], strict=True):
            assert {k: float(v) for k, v in one.items()} == {k: float(v) for k, v in two.items()}
        for one, two in zip(clean[4:], dirty[4:], strict=True):
            assert isinstance(one, Correction)
            left, right = (corrected(view, each) for each in (one, two))
            assert torch.equal(left.loss_mask, right.loss_mask)
            assert left.importance is None or torch.equal(left.importance[trained], right.importance[trained])
