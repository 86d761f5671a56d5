"""Tokens sorted by the experts that they were sent to."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

#: CUDA's grouped product wants rows of a multiple of so many bytes.
_ALIGNED = 16
#: (rows [m, hidden_size], sorted by expert; the expert of each, int64 [m]; the end of each expert's rows, int32 [experts]) -> [m, width]
Mlp = Callable[[Tensor, Tensor, Tensor], Tensor]


def routed(x: Tensor, gates: Tensor, experts: Tensor, n_experts: int, mlp: Mlp) -> Tensor:
    """Return the sum [n, width] over each token's experts of its gate times what the expert gives.

    Args:
        x: tokens [n, hidden_size].
        gates: [n, top_k].
        experts: int64 [n, top_k].
        n_experts: of the layer.
        mlp: what the experts give.
    """
    n, top_k = experts.shape
    chosen, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(n_experts, device=x.device), right=True, out_int32=True)
    given = mlp(x[order // top_k], chosen, ends)
    back = torch.empty_like(given)
    back[order] = given
    return torch.bmm(gates[:, None], back.view(n, top_k, -1)).squeeze(1)


def has_grouped_product(weights: Tensor) -> bool:
    """Return whether CUDA has one kernel for products with weights [experts, hidden_size, columns], or the other way round."""
    is_aligned = all(size * weights.element_size() % _ALIGNED == 0 for size in weights.shape[1:])
    return weights.is_cuda and weights.dtype == torch.bfloat16 and is_aligned


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the product [m, columns] of each expert's rows with its matrix, of weights [experts, hidden_size, columns].

    In one kernel where CUDA has it (`has_grouped_product`); elsewhere the host waits for `ends`.
    """
    if has_grouped_product(weights):
        return torch._grouped_mm(rows, weights, offs=ends)
    out = rows.new_empty(len(rows), weights.shape[2])
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if begin < end:
            torch.mm(rows[begin:end], weights[expert], out=out[begin:end])
    return out
