"""Whether this CPU computes matrix products and attention faster in bfloat16 or in float32.

PyTorch runs every bfloat16 operator on every CPU; without the instructions for it, it does so through float32, a piece at a
time, and takes several times as long as for the same operator on float32 tensors.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def multiplies_bfloat16() -> bool:
    """Return whether matrix products are faster in bfloat16 than in float32: AMX or AVX512_BF16 on x86, else oneDNN's answer.

    Measured without either (Ice Lake, one thread, 64 rows): 25 to 30 GFLOP/s in bfloat16, 85 to 105 in float32.
    """
    if _is_x86():
        return has_amx() or bool(torch.cpu._is_avx512_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the matrix product `a @ b`, of their dtype, into `out` if it is given.

    bfloat16 matrices on a CPU that has no such products are multiplied as float32 and the result is rounded, once: what the
    instructions would do, but for the order of the sums. Gradients keep the bfloat16 matrices, as without this.
    """
    if a.dtype is torch.bfloat16 and a.device.type == "cpu" and not multiplies_bfloat16():
        if out is not None:
            return out.copy_(torch.matmul(a.float(), b.float()))
        found: Tensor = _Product.apply(a, b)
        return found
    return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)


class _Product(torch.autograd.Function):
    """A product through float32 that saves its bfloat16 matrices for the backward pass: autograd would save the float32 ones."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of a [..., m, k] and b [k, n] or [..., k, n]."""
        ctx.save_for_backward(a, b)
        return torch.matmul(a.float(), b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of both."""
        a, b = ctx.saved_tensors
        of_a = product(gradient, b.mT) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_a, None
        rows, gradients = (each.flatten(0, -2) if b.dim() == 2 else each for each in (a, gradient))
        return of_a, product(rows.mT, gradients)


def attends_in_bfloat16() -> bool:
    """Return whether `scaled_dot_product_attention` is faster in bfloat16 than in float32.

    PyTorch's kernel packs bfloat16 blocks for AMX alone. Without it every product of a block is a plain loop:
    measured on such a CPU for one query token, 9 heads over 3, 32 to 512 positions: 4 to 6 times the time of float32.
    """
    return has_amx() or not _is_x86()


@cache
def has_amx() -> bool:
    """Return whether the CPU has matrix units (Intel AMX) that this process may use."""
    return bool(torch.cpu._is_amx_tile_supported())


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def describe() -> str:
    """Return what decides how fast this machine's CPU is, in one line: its name, cores, caches, and arithmetic."""
    found = torch.cpu.get_capabilities()
    caches = [
        f"{name} {found[key] / 2**10:,.0f} KiB"
        for name, key in (("L1d", "l1d_cache_size"), ("L2", "l2_cache_size"))
        if found.get(key)
    ]
    arithmetic = ["AMX"] * has_amx() + ["bfloat16 products"] * multiplies_bfloat16()
    return ", ".join(
        [
            str(found.get("cpu_name") or platform.machine()),
            f"{found.get('num_physical_cores') or torch.get_num_threads()} cores",
            *caches,
            " and ".join(arithmetic) or "no instructions for bfloat16",
        ]
    )
