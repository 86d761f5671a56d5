"""KL estimators: by hand, near zero, and at the ends of float32."""

import math

import pytest
import torch
from slime_algos.terms.kl import KL_ESTIMATORS, k3, low_var_kl


@pytest.mark.parametrize(
    ("kind", "x", "value"),
    [
        ("k1", 0.5, 0.5),
        ("k1", -0.5, -0.5),
        ("k2", 0.5, 0.125),
        ("k2", -0.5, 0.125),
        ("k3", 0.5, math.exp(-0.5) - 0.5),
        ("k3", -0.5, math.exp(0.5) - 1.5),
        ("k3", math.log(2), math.log(2) - 0.5),
        ("low_var_kl", 0.5, math.exp(-0.5) - 0.5),
        ("low_var_kl", -5.0, 10.0),
        ("low_var_kl", 12.0, 10.0),
        ("low_var_kl", 10.5, 9.5 + math.exp(-10.5)),
    ],
)
def test_estimator_at_a_point(kind, x, value):
    assert KL_ESTIMATORS[kind](torch.tensor([x], dtype=torch.float64)).item() == pytest.approx(
        value, rel=1e-14
    )


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_equal_policies_have_no_divergence(kind):
    assert KL_ESTIMATORS[kind](torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_k3_keeps_its_digits_near_zero():
    # x²/2 - x³/6: exp(-x) - 1 + x in float32 would be off by a tenth
    x = torch.tensor([1e-3, -1e-3])
    assert k3(x).tolist() == pytest.approx([1e-6 / 2 - 1e-9 / 6, 1e-6 / 2 + 1e-9 / 6], rel=1e-3)


def test_k3_at_minus_forty_is_not_cut_off():
    assert k3(torch.tensor([-40.0])).item() == pytest.approx(2.3538526683701997e17, rel=1e-5)


@pytest.mark.parametrize("x", [-1e30, -1000.0, -100.0, -20.0, 20.0, 100.0, 1e30])
def test_low_var_kl_is_ten_with_no_gradient_at_extremes(x):
    point = torch.tensor([x], requires_grad=True)
    value = low_var_kl(point)
    value.backward()
    assert value.item() == 10.0
    assert point.grad.item() == 0.0


@pytest.mark.parametrize(("kind", "tolerance"), [("k1", 0.01), ("k3", 0.01), ("k2", 0.03)])
def test_mean_over_samples_of_the_policy_is_the_divergence(kind, tolerance):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    divergence = (policy * (policy / reference).log()).sum().item()
    x = (policy / reference).log()
    mean = (policy * KL_ESTIMATORS[kind](x)).sum().item()  # the expectation itself, not a draw
    exact = {"k1": divergence, "k3": divergence, "k2": (policy * x**2 / 2).sum().item()}[kind]
    assert mean == pytest.approx(exact, rel=1e-12)
    assert mean == pytest.approx(divergence, abs=tolerance)
