"""RMSNorm against torch's, its gradient against autograd's of the formula, and what it keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture
def rms_norm():
    from slime_megatron.model.layers.norm import rms_norm

    return rms_norm


def formula(x, weight, epsilon):
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


@pytest.mark.parametrize("shape", [(7, 1, 48), (5, 3, 16), (1, 8), (0, 8)])
def test_gradients_are_those_of_the_formula(rms_norm, shape):
    x = torch.randn(shape, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(shape[-1]).requires_grad_()
    gradient = torch.randn(shape)
    found = torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), gradient)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    wanted = torch.autograd.grad(formula(*exact, 1e-5), exact, gradient.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_it_returns_is_torchs(rms_norm, dtype):
    x, weight = (3 * torch.randn(200, 64)).to(dtype), torch.randn(64).to(dtype)
    found, wanted = rms_norm(x, weight, 1e-6), F.rms_norm(x, (64,), weight, 1e-6)
    assert found.dtype == dtype
    assert torch.equal(found, wanted)


def test_a_weight_in_float32_is_not_rounded(rms_norm):
    """Every row is normalised to ones, so the weight itself is rounded, once: halves to even."""
    x = torch.full((1, 4), 2.0).bfloat16()
    weight = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-9, 1.25])
    assert rms_norm(x, weight, 0.0).tolist() == [[1.0, 1.0, 1 + 2**-7, 1.25]]


def test_a_gradient_of_the_weight_alone_or_of_the_input_alone(rms_norm):
    x, weight = torch.randn(6, 8), torch.randn(8)
    both = torch.autograd.grad(rms_norm(x.requires_grad_(), weight.requires_grad_(), 1e-5).sum(), (x, weight))
    (of_x,) = torch.autograd.grad(rms_norm(x, weight.detach(), 1e-5).sum(), x)
    (of_weight,) = torch.autograd.grad(rms_norm(x.detach(), weight, 1e-5).sum(), weight)
    assert torch.equal(of_x, both[0])
    assert torch.equal(of_weight, both[1])


def test_it_keeps_its_input_and_a_scale_of_each_row(rms_norm):
    kept = []
    x, weight = torch.randn(10, 32).bfloat16().requires_grad_(), torch.ones(32).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.nbytes) or tensor, lambda t: t
    ):
        rms_norm(x, weight, 1e-5)
    assert sorted(kept) == sorted([10 * 32 * 2, 10 * 4, 32 * 2])
