"""Log-ratios between two policies on the same tokens, and the importance ratio."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Largest log-ratio, nats, that `importance_ratio` exponentiates."""


def masked_log_ratio(log_probs: Tensor, other: Tensor, loss_mask: Tensor) -> Tensor:
    """Return log_probs − other [T], and 0 (with no gradient) where the mask is 0.

    Tokens that are not trained on were put in by an environment: the policy may find them impossible, and
    weighting an infinite ratio by 0 afterwards would give NaN.
    """
    return torch.where(loss_mask > 0, log_probs - other, torch.zeros_like(log_probs))


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) [T], with the log-ratio held within ±20.

    Outside, the loss is long clipped or lost, and an overflow would turn the zero gradient of the branch that
    clipping discards into NaN.
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
