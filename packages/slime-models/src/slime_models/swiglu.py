"""SwiGLU by kernels of Triton, which read and write each tensor once, as operators of PyTorch: where `triton_launch.can_launch`.

What lies between a load and a store is float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

#: Columns that a program computes.
_COLUMNS = 1024


@triton.jit
def swiglu_kernel(mixed, out, width, COLUMNS: tl.constexpr):
    """Some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate = tl.load(mixed + 2 * row * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(mixed + (2 * row + 1) * width + at, mask=at < width, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, product.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def swiglu_backward_kernel(mixed, gradient, out, width, COLUMNS: tl.constexpr):
    """Some columns of a row's gate and up."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate = tl.load(mixed + 2 * row * width + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(mixed + (2 * row + 1) * width + at, mask=at < width, other=0.0).to(tl.float32)
    given = tl.load(gradient + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = given * up * share * (1.0 + gate * (1.0 - share))
    kind = out.dtype.element_ty
    tl.store(out + 2 * row * width + at, of_gate.to(kind), mask=at < width)
    tl.store(out + (2 * row + 1) * width + at, (given * gate * share).to(kind), mask=at < width)


@torch.library.custom_op("slime_models::swiglu", mutates_args=())
def swiglu(mixed: Tensor) -> Tensor:
    """Return silu(gate) * up, [rows, width], of both side by side, [rows, 2 width], contiguous."""
    n, width = len(mixed), mixed.size(1) // 2
    out = mixed.new_empty(n, width)
    swiglu_kernel[n, triton.cdiv(width, _COLUMNS)](mixed, out, width, COLUMNS=_COLUMNS, num_warps=4)
    return out


@swiglu.register_fake
def _(mixed: Tensor) -> Tensor:
    return mixed.new_empty(len(mixed), mixed.size(1) // 2)


@torch.library.custom_op("slime_models::swiglu_backward", mutates_args=())
def swiglu_backward(mixed: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient [rows, 2 width] of what `swiglu` was given, of that of its result [rows, width]; both contiguous."""
    n, width = gradient.shape
    out = torch.empty_like(mixed)
    swiglu_backward_kernel[n, triton.cdiv(width, _COLUMNS)](
        mixed, gradient, out, width, COLUMNS=_COLUMNS, num_warps=4
    )
    return out


@swiglu_backward.register_fake
def _(mixed: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(mixed)
