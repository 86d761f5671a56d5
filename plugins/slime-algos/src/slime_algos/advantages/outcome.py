"""Advantages of outcome rewards: one number a sample, the same for each of its tokens, less the KL of later tokens."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.terms.sample_sums import discounted_sums


def outcome(view: TokenView, credits: Tensor, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Return A_t = credit of t's sample − Σ_{k ≥ t} kl_k, over the k of t's sample, as advantages and returns.

    The sum is the policy gradient of a KL penalty in the reward: a token answers for the penalties after it.
    Baselines and deviations are those of the rewards alone, so that a penalty changes no other sample's credit.

    Args:
        view: reads `sample_of_token`, `offsets`.
        credits: [N] credit of each sample.
        kl: [T] penalty of each token; 0 where the mask is.

    Source: OpenRLHF `get_cumulative_returns`. verl and TRL (RLOO) subtract the whole sum from the reward before
    it is normalised; the reference system's `grpo` ignores `kl_coef`.
    """
    advantages: Tensor = credits.detach()[view.sample_of_token]
    if kl.any():
        advantages = advantages - discounted_sums(kl, view.offsets, discount=1.0)
    return advantages, advantages
