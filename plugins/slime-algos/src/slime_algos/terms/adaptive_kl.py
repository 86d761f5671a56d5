"""The adaptive coefficient of the KL penalty in the reward: a proportional controller."""

from __future__ import annotations

import math

_MOST = 0.2
"""Relative error beyond which the coefficient changes no faster."""


def next_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float, n_samples: int) -> float:
    """Return kl_coef · (1 + clip(kl / target − 1, ±0.2) · n_samples / horizon).

    A batch without a KL divergence (NaN: no token was trained on) changes nothing.

    Args:
        kl_coef: coefficient of this batch.
        kl: its KL divergence.
        target: what the divergence is to be, in the same unit.
        horizon: samples over which the coefficient changes by the relative error.
        n_samples: samples of this batch.

    Source: Ziegler et al., arXiv 1909.08593, section 2.2; verl 0.9.1 `AdaptiveKLController`.
    """
    if math.isnan(kl):
        return kl_coef
    error = max(-_MOST, min(kl / target - 1, _MOST))
    return kl_coef * (1 + error * n_samples / horizon)
