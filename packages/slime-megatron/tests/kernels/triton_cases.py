"""Kernels of Triton against PyTorch's operators: `test_triton_kernels.py` runs these tests, on a CPU in Triton's interpreter."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from slime_megatron import compat

compat.install()

from slime_megatron.model import log_probs  # noqa: E402
from slime_megatron.model.layers import attention, swiglu  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def kernels(*, taken):
    """Let the trainer's functions take kernels, or PyTorch's operators."""
    with contextlib.ExitStack() as stack:
        for module in (attention, swiglu, log_probs):
            stack.enter_context(mock.patch.object(module, "can_launch", lambda _: taken))
        yield


def both(compute, *inputs):
    """What `compute` gives of float32 inputs, and the gradients of those that have one, by kernels and without."""
    found = []
    for taken in (True, False):
        leaves = [
            each.detach().clone().to(DEVICE).requires_grad_(each.requires_grad)
            if isinstance(each, torch.Tensor)
            else each
            for each in inputs
        ]
        with kernels(taken=taken):
            outputs = compute(*leaves)
            outputs = [
                each for each in (outputs if isinstance(outputs, tuple) else (outputs,)) if each is not None
            ]
            weights = [
                torch.randn(each.shape, generator=torch.Generator().manual_seed(1)).to(each)
                for each in outputs
            ]
            sum((each * weight).sum() for each, weight in zip(outputs, weights, strict=True)).backward()
        gradients = [each.grad for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
        found.append([*(each.detach() for each in outputs), *gradients])
    return zip(*found, strict=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(4, 16, 16), (3, 24, 8), (20, 40, 24)])
def test_heads_are_rotated_and_gradients_back(heads, dim, rotary, interleaved):
    torch.manual_seed(0)
    angles = torch.randn(7, 1, rotary // 2)
    tables = (torch.cat((each, each), -1) for each in (angles.cos(), angles.sin()))
    x = torch.randn(7, heads, dim, requires_grad=True)

    def compute(x, cos, sin):
        return attention.rotated(x, cos, sin, interleaved=interleaved)

    for kernel, plain in both(compute, x, *tables):
        torch.testing.assert_close(kernel, plain, rtol=1e-5, atol=1e-6)


def test_rows_that_lie_apart_are_rotated_with_a_part_of_wider_tables():
    torch.manual_seed(0)
    angles = torch.randn(5, 1, 8)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    wide = torch.randn(5, 6, 16, requires_grad=True)

    def compute(wide, cos, sin):
        return attention.rotated(wide[:, 1:4], cos[..., 4:12], sin[..., 4:12], interleaved=True)

    for kernel, plain in both(compute, wide, cos, sin):
        torch.testing.assert_close(kernel, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 2 * 1300), (3, 1, 2 * 24)])
def test_swiglu_and_its_gradient(shape):
    torch.manual_seed(0)
    for kernel, plain in both(swiglu.swiglu, torch.randn(shape, requires_grad=True)):
        torch.testing.assert_close(kernel, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("columns", "size", "temperature"), [(300, 300, 1.0), (5000, 4990, 0.7)])
def test_log_probs_entropies_and_their_gradients(columns, size, temperature, with_entropy):
    """Two chunks of rows; columns of padding beyond the vocabulary."""
    torch.manual_seed(0)
    hidden = torch.randn(7, 16, requires_grad=True)
    weight = torch.randn(columns, 16, requires_grad=True)
    targets = torch.randint(size, (7,))

    def compute(hidden, weight, targets):
        return log_probs.token_log_probs(
            hidden,
            weight,
            targets,
            vocabulary=log_probs.VocabularyShard(size),
            temperature=temperature,
            with_entropy=with_entropy,
            chunk_tokens=4,
        )

    for kernel, plain in both(compute, hidden, weight, targets):
        torch.testing.assert_close(kernel, plain, rtol=1e-5, atol=1e-5)
