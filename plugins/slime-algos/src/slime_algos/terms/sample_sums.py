"""Sums along samples: quantities [T], flat over ragged samples, without a loop over tokens or samples."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sums(values: Tensor, offsets: Tensor, *, discount: float) -> Tensor:
    """Return y [T] with y_t = Σ_{k ≥ t} discount^(k − t) values_k, over the k of t's own sample.

    Doubling (Hillis and Steele): after n rounds y_t covers 2^n tokens, so 32,768 tokens take 15 rounds, and
    rounding errors grow with the rounds, not with the tokens.

    Args:
        values: [T], float.
        offsets: int64 [N + 1]: sample i owns the tokens offsets[i]:offsets[i + 1].
        discount: weight of a token beside the one before it.
    """
    n = len(values)
    ends_of = torch.repeat_interleave(offsets[1:], offsets.diff(), output_size=n)
    left = ends_of - torch.arange(n, device=values.device)
    sums, reach, longest = values, 1, int(left.max()) if len(left) else 0
    while reach < longest:
        later = torch.where(left[:-reach] > reach, sums[reach:], torch.zeros_like(sums[reach:]))
        sums = torch.cat([sums[:-reach] + discount**reach * later, sums[-reach:]])
        reach *= 2
    return sums


def running_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Return y [T] with y_t = Σ_{k ≤ t} values_k, over the k of t's own sample."""
    return discounted_sums(values.flip(0), len(values) - offsets.flip(0), discount=1.0).flip(0)


def sample_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each sample's tokens [N]; 0 for a sample without tokens. Differentiable, and
    deterministic on every device, unlike `index_add`."""
    sums: Tensor = torch.segment_reduce(values, "sum", offsets=offsets, initial=0)
    return sums


def sample_means(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Return the mean over each sample's tokens of mask 1 [N], 0 where there are none. Differentiable.

    `values` must be finite where the mask is 0.
    """
    return sample_sums(values * mask, offsets) / sample_sums(mask, offsets).clamp(min=1)


def trained_tokens(loss_mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (positions int64 [K] of the tokens of mask 1, their offsets int64 [N + 1]).

    What an environment wrote between two turns is not a step of the policy: credit passes over it.
    """
    trained = loss_mask > 0
    passed = torch.cat([trained.new_zeros(1, dtype=torch.int64), trained.cumsum(0)])
    return trained.nonzero().squeeze(1), passed[offsets]


def ends(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (samples int64 [M] that have tokens, position int64 [M] of the last token of each)."""
    having = (offsets.diff() > 0).nonzero().squeeze(1)
    return having, offsets[1:][having] - 1
