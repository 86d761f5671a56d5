"""REINFORCE++: returns of token rewards, whitened over the batch; no critic, and no group."""

from __future__ import annotations

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.estimator import estimator
from slime_algos.terms.sample_sums import discounted_sums, ends, trained_tokens


@estimator(reward_transform="raw")
def reinforce_plus_plus(view: TokenView, kl: Tensor, *, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Credit each token with the discounted return from it on. Wants `normalize_advantages`.

    ρ_t = −kl_t, and the sample's reward more at its last trained token; A_t = G_t = Σ_{k ≥ t} γ^(k − t) ρ_k over
    trained tokens.

    Args:
        view: reads `rewards`, `loss_mask`, `offsets`.
        kl: [T] penalty of each token.
        gamma: discount of a token's reward beside that of the token before it.

    Source: arXiv 2501.03262, eq. 8 and 9; verl `compute_reinforce_plus_plus_outcome_advantage`. The reference
    system counts an environment's tokens as steps of the policy.
    """
    positions, offsets = trained_tokens(view.loss_mask, view.offsets)
    samples, last = ends(offsets)
    rewards = -kl[positions]
    rewards[last] += view.rewards[samples]
    returns = torch.zeros_like(kl).index_copy(0, positions, discounted_sums(rewards, offsets, discount=gamma))
    return returns, returns


@estimator(reward_transform="group-centre")
def reinforce_plus_plus_baseline(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Credit each token with its sample's reward less the group's mean, less its own penalty.

    Wants `normalize_advantages`.

    Args:
        view: reads `rewards`, `sample_of_token`.
        kl: [T] penalty of each token; unlike in `outcome`, a token does not answer for those after it.

    Source: arXiv 2501.03262, eq. 10 to 12; slime/utils/ppo_utils.py
    `get_reinforce_plus_plus_baseline_advantages`.
    """
    advantages = view.rewards.detach()[view.sample_of_token] - kl
    return advantages, advantages
