"""The kernels as operators of PyTorch, which can be traced without a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from slime_megatron.kernels import triton_kernels

#: Numbers of a tile, about, that a program rotates.
_TILE = 1024
#: Columns that a program computes: of logits that are summed row by row, and of their gradient.
_SUMMED_COLUMNS, _GRADIENT_COLUMNS = 2048, 4096


@torch.library.custom_op("slime_megatron::rotate", mutates_args=())
def rotate(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Return x [t, heads, head_dim] with the first dimensions of each head rotated, contiguous.

    Args:
        x: with a last stride of 1.
        cosine: [t, 1, rotary_dim] with a last stride of 1; its first half is read.
        sine: the same, and with the same strides.
        interleaved: whether neighbours are pairs, or the halves of what is rotated.
        inverse: whether to rotate back, as a gradient is.
    """
    n, heads, dim = x.shape
    rotated = cosine.size(-1)
    half, rest = triton.next_power_of_2(rotated // 2), dim - rotated
    tile = max(1, min(triton.next_power_of_2(heads), _TILE // (2 * half)))
    out = torch.empty(n, heads, dim, dtype=x.dtype, device=x.device)
    triton_kernels.rotate_kernel[n, triton.cdiv(heads, tile)](
        x,
        cosine,
        sine,
        out,
        x.stride(0),
        x.stride(1),
        cosine.stride(0),
        heads,
        HEADS=tile,
        DIM=dim,
        ROTATED=rotated,
        HALF=half,
        REST=triton.next_power_of_2(rest) if rest else 0,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        num_warps=2,
    )
    return out


@rotate.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("slime_megatron::vocabulary_sums", mutates_args=())
def vocabulary_sums(
    logits: Tensor, targets: Tensor, n_real: int, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return of each row the largest z = logit / T, [rows]; and z of its target, sum(exp(z - largest)), and, where entropies are wanted,
    sum(exp(z - largest) z), [2 or 3, rows]: float32.

    Args:
        logits: [rows, columns], with a last stride of 1.
        targets: int64 [rows], a column of each.
        n_real: columns that count, from the first on.
        temperature: T.
        with_entropy: whether entropies are wanted.
    """
    n = len(logits)
    peaks = torch.empty(n, dtype=torch.float32, device=logits.device)
    sums = peaks.new_empty(3 if with_entropy else 2, n)
    triton_kernels.vocabulary_sums_kernel[(n,)](
        logits,
        targets,
        peaks,
        sums,
        n,
        logits.stride(0),
        n_real,
        temperature,
        WITH_ENTROPY=with_entropy,
        BLOCK=_SUMMED_COLUMNS,
        num_warps=8,
    )
    return peaks, sums


@vocabulary_sums.register_fake
def _(
    logits: Tensor, targets: Tensor, n_real: int, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    peaks = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    return peaks, peaks.new_empty(3 if with_entropy else 2, len(logits))


@torch.library.custom_op("slime_megatron::vocabulary_gradient", mutates_args=("logits",))
def vocabulary_gradient(
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    outer: Tensor,
    hits: Tensor,
    entropies: Tensor | None,
    of_entropies: Tensor | None,
    n_real: int,
    temperature: float,
) -> None:
    """Write over logits the gradient that they have: with z = logit / T and p = exp(z - lse), p (outer + of_entropy (z - lse + H)), plus
    `hits` in the target's column.

    Args:
        logits: [rows, columns], with a last stride of 1.
        targets: int64 [rows], a column of each.
        normalisers: float32 [rows], lse.
        outer: float32 [rows].
        hits: float32 [rows].
        entropies: float32 [rows], H; None where they have no gradient.
        of_entropies: float32 [rows]; likewise.
        n_real: columns that count; the gradient of others is 0.
        temperature: T.
    """
    n, columns = logits.shape
    triton_kernels.vocabulary_gradient_kernel[n, triton.cdiv(columns, _GRADIENT_COLUMNS)](
        logits,
        targets,
        normalisers,
        outer,
        hits,
        entropies,
        of_entropies,
        logits.stride(0),
        columns,
        n_real,
        temperature,
        WITH_ENTROPY=entropies is not None,
        BLOCK=_GRADIENT_COLUMNS,
        num_warps=8,
    )


@vocabulary_gradient.register_fake
def _(*_: Any) -> None:
    return None
