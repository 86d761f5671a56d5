"""Estimators of KL(π || π_ref) from the log-probs of tokens drawn from π.

All take x = log π − log π_ref [T] (nats) and return one value a token [T].
Source: J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html; slime/utils/ppo_utils.py
`compute_approx_kl`, from which we differ where it overflows (see `k3`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KlType = Literal["k1", "k2", "k3", "low_var_kl", "abs"]

K3_LIMIT = 60.0
"""`k3` holds −x below this, nats: what it gives stays finite in float32 when an importance ratio multiplies it."""
LOW_VAR_LIMIT = 10.0
"""`low_var_kl` is cut off here, nats."""


def k1(x: Tensor) -> Tensor:
    """Return x: unbiased, of either sign, of high variance."""
    return x


def k2(x: Tensor) -> Tensor:
    """Return x²/2: never negative, biased, of low variance."""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """Return e^(−x) − 1 + x with x held above −60: never negative, unbiased, and finite for every finite x."""
    # expm1 keeps the digits that exp(-x) - 1 loses near x = 0, where training starts.
    held = x.clamp(min=-K3_LIMIT)
    return torch.expm1(-held) + held


def low_var_kl(x: Tensor) -> Tensor:
    """Return k3, cut off at 10, without gradient there."""
    return k3(x).clamp(max=LOW_VAR_LIMIT)


def absolute(x: Tensor) -> Tensor:
    """Return |x|: verl's `abs`; a distance, not an estimate of the divergence."""
    return x.abs()


KL_ESTIMATORS: dict[KlType, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": absolute,
}
"""Estimators by the names that `--kl-loss-type` takes."""
