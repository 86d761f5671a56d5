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


@pytest.mark.parametrize("shapes", [((5, 4), (4, 3)), ((2, 5, 4), (4, 3)), ((2, 5, 4), (2, 4, 3))])
def test_gradients_are_those_of_float32_rounded_once_and_keep_bfloat16_matrices(monkeypatch, shapes):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        found = cpu.product(a, b)
    gradient = torch.randn(found.shape, generator=generator).bfloat16()
    found.backward(gradient)
    exact_a, exact_b = (one.detach().float().requires_grad_() for one in (a, b))
    exact = exact_a @ exact_b
    exact.backward(gradient.float())
    assert found.equal(exact.bfloat16())
    torch.testing.assert_close(a.grad, exact_a.grad.bfloat16())
    torch.testing.assert_close(b.grad, exact_b.grad.bfloat16())
    assert [one.dtype for one in saved] == [torch.bfloat16] * 2


def test_only_the_gradients_that_are_wanted_are_made(monkeypatch):
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    a, b = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    cpu.product(a, b).sum().backward()
    assert a.grad is None and b.grad.tolist() == [[2.0] * 4] * 3
    assert not cpu.product(a, a.t()).requires_grad
