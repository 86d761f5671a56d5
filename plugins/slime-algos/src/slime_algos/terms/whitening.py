"""Whitening: advantages of mean 0 and variance 1 over the trained tokens of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to the variance."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return (values − mean)/√(variance + 1e-8) [T] over the tokens of mask 1, and 0 elsewhere.

    The variance is the unbiased one. One token, and tokens that are all equal, give 0. An estimator sees the
    whole batch on every rank, so nothing need be communicated.

    Source: slime/utils/distributed_utils.py `distributed_masked_whiten`; verl `masked_whiten`, which raises on
    one token.
    """
    trained = mask > 0
    count = trained.sum()
    zeros = torch.zeros_like(values)
    mean = torch.where(trained, values, zeros).sum() / count.clamp(min=1)
    centred = torch.where(trained, values - mean, zeros)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + EPSILON)
