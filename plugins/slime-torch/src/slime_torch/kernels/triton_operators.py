"""What a decoding step on a GPU computes between its matrix products, as operators of PyTorch that launch kernels of Triton.

As operators they can be traced without a GPU. No shape of theirs depends on how long requests are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from slime_torch.kernels import triton_kernels

#: Keys that a program of attention reads at a time.
_KEYS = 64
#: Programs for each multiprocessor, about: keys are split among more programs where requests and heads are fewer.
_PROGRAMS = 4
#: Parts of one request's keys, at most.
_MOST_SPLITS = 32
#: Rows of a matrix product of Triton, at least.
_LEAST_ROWS = 16
_LOG2_E = 1.4426950408889634
#: Blocks of logits that a program sums.
_BLOCKS = 8


@torch.library.custom_op("slime_torch::place_heads", mutates_args=("heads", "layer"))
def place_heads(
    heads: Tensor,
    layer: Tensor,
    cosine: Tensor,
    sine: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
    positions: Tensor,
    page: Tensor,
    inside: Tensor,
) -> None:
    """Normalise and rotate query and key heads in place, and store keys and values in the cache.

    Args:
        heads: [tokens, queries + 2 * groups, dim], contiguous.
        layer: of the cache, [2, pages, groups, tokens of a page, dim], contiguous, of the same dtype.
        cosine: [positions, dim], contiguous.
        sine: the same, with the sign of each half.
        query_norm: float32 [dim]; None where heads have no norms.
        key_norm: the same.
        epsilon: of these norms.
        positions: int64 [tokens].
        page: int64 [tokens], that each token is kept in.
        inside: int64 [tokens], its place there.
    """
    n, all_heads, dim = heads.shape
    groups = layer.size(2)
    triton_kernels.place_kernel[n, all_heads](
        heads,
        cosine,
        sine,
        query_norm,
        key_norm,
        layer,
        positions,
        page,
        inside,
        layer.size(1),
        epsilon,
        QUERIES=all_heads - 2 * groups,
        GROUPS=groups,
        DIM=dim,
        HALF=triton.next_power_of_2(dim // 2),
        PAGE_LEN=layer.size(3),
        HAS_NORMS=query_norm is not None,
        num_warps=1,
    )


@place_heads.register_fake
def _(*_: Any) -> None:
    return None


@torch.library.custom_op("slime_torch::attend_pages", mutates_args=())
def attend_pages(
    heads: Tensor,
    layer: Tensor,
    positions: Tensor,
    pages: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    splits: int,
) -> Tensor:
    """Return the attention [slots, queries * dim] of each slot's newest token to those that the slot holds.

    Args:
        heads: [slots, queries + 2 * groups, dim], contiguous; the first are queries.
        layer: of the cache, [2, pages, groups, tokens of a page, dim], contiguous; the newest tokens are there.
        positions: int64 [slots], of the newest token of each.
        pages: int64 [slots, most pages of one], with a last stride of 1.
        sinks: [queries], scores of one key more, whose value is zero.
        scale: multiplies scores.
        window: tokens that each one sees, itself among them; 0 for all earlier ones.
        splits: parts of a slot's keys that are computed side by side, a power of two (`splits_for`).

    Source: Dao et al., "Flash-Decoding for long-context inference" (2023): parts of the keys, and their weighted mean.
    """
    n, all_heads, dim = heads.shape
    groups = layer.size(2)
    queries, width = all_heads - 2 * groups, max(16, triton.next_power_of_2(dim))
    out = heads.new_empty(n, queries * dim)
    parts = heads.new_empty(n * queries * splits, dim, dtype=torch.float32) if splits > 1 else out
    part_sums = heads.new_empty(n * queries * splits, dtype=torch.float32) if splits > 1 else out
    triton_kernels.attend_kernel[n, groups, splits](
        heads,
        layer,
        out,
        parts,
        part_sums,
        positions,
        pages,
        sinks,
        layer.size(1),
        pages.stride(0),
        scale * _LOG2_E,
        QUERIES=queries,
        GROUPS=groups,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(queries // groups)),
        DIM=dim,
        WIDTH=width,
        PAGE_LEN=layer.size(3),
        WINDOW=window,
        HAS_SINKS=sinks is not None,
        SPLITS=splits,
        KEYS=_KEYS if dim <= 128 else _KEYS // 2,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        triton_kernels.combine_kernel[(n * queries,)](
            parts, part_sums, out, DIM=dim, WIDTH=width, SPLITS=splits, num_warps=1
        )
    return out


@attend_pages.register_fake
def _(heads: Tensor, layer: Tensor, *_: Any) -> Tensor:
    queries = heads.size(1) - 2 * layer.size(2)
    return heads.new_empty(heads.size(0), queries * heads.size(2))


@torch.library.custom_op("slime_torch::block_sums", mutates_args=())
def block_sums(logits: Tensor, temperatures: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return of each row's blocks the largest tempered logit m, and the sum of exp(logit / temperature - m): float32 [rows, blocks] each.

    Args:
        logits: [rows, columns], contiguous; -inf in columns that are dropped.
        temperatures: float32 [rows].
        block: columns of a block, a power of two; the last one may have fewer.
    """
    n, columns = logits.shape
    blocks = triton.cdiv(columns, block)
    maxima, sums = (logits.new_empty(n, blocks, dtype=torch.float32) for _ in range(2))
    triton_kernels.block_sums_kernel[n, triton.cdiv(blocks, _BLOCKS)](
        logits, temperatures, maxima, sums, columns, blocks, BLOCK=block, BLOCKS=_BLOCKS, num_warps=4
    )
    return maxima, sums


@block_sums.register_fake
def _(logits: Tensor, temperatures: Tensor, block: int) -> tuple[Tensor, Tensor]:
    maxima, sums = (
        logits.new_empty(len(logits), -(-logits.size(1) // block), dtype=torch.float32) for _ in range(2)
    )
    return maxima, sums


def splits_for(programs: int, longest: int, *, multiprocessors: int) -> int:
    """Return into how many parts keys are split, for so many programs without it, and requests of `longest` tokens at most."""
    wanted = min(multiprocessors * _PROGRAMS // max(programs, 1), longest // (2 * _KEYS), _MOST_SPLITS)
    return triton.next_power_of_2(wanted + 1) // 2 if wanted > 1 else 1
