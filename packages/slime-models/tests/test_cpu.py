"""What a CPU without bfloat16 products computes is what one with them does, but for the order of sums."""

from __future__ import annotations

import pytest
import torch
from slime_models import cpu


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("into", [True, False])
def test_a_bfloat16_product_is_the_exact_one_rounded_once(monkeypatch, native, into):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: native)
    # Small whole numbers: every sum is exact in float32, so that only the last rounding is left.
    a = torch.randint(-8, 9, (37, 64)).bfloat16()
    b = torch.randint(-8, 9, (51, 64)).bfloat16().t()
    exact = (a.double() @ b.double()).bfloat16()
    out = torch.full((37, 51), torch.nan).bfloat16() if into else None
    found = cpu.product(a, b, out=out)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, exact)
    assert out is None or found is out


def test_gradients_of_a_product_through_float32_are_those_of_the_product(monkeypatch):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    a = torch.randint(-4, 5, (5, 8)).bfloat16().requires_grad_()
    b = torch.randint(-4, 5, (8, 3)).bfloat16().requires_grad_()
    weights = torch.randint(-4, 5, (5, 3)).bfloat16()
    d_a, d_b = torch.autograd.grad((cpu.product(a, b) * weights).sum(), (a, b))
    assert torch.equal(d_a, (weights.double() @ b.detach().double().t()).bfloat16())
    assert torch.equal(d_b, (a.detach().double().t() @ weights.double()).bfloat16())


def test_float32_products_are_left_alone(monkeypatch):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    assert torch.equal(cpu.product(a, b), a @ b)
