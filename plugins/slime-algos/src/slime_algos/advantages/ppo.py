"""Generalised advantage estimation: the advantages of PPO with a critic."""

from __future__ import annotations

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.decorators.estimator import estimator
from slime_algos.terms.sample_sums import discounted_sums, ends, trained_tokens


@estimator(reward_transform="raw", reads={"values"})
def ppo(view: TokenView, kl: Tensor, *, gamma: float = 1.0, lambd: float = 1.0) -> tuple[Tensor, Tensor]:
    """Credit tokens by generalised advantage estimation with the critic's values.

    ρ_t = −kl_t, and the sample's reward more at its last trained token; δ_t = ρ_t + γ V_{t+1} − V_t, where V
    is 0 after the last token; A_t = Σ_{k ≥ t} (γλ)^(k − t) δ_k; returns = A + V. t runs over trained tokens.

    Args:
        view: reads `values`, `rewards`, `loss_mask`, `offsets`.
        kl: [T] penalty of each token.
        gamma: discount of a token's reward beside that of the token before it.
        lambd: weight of longer estimates; 1 is the whole return less the value, 0 one step.

    Returns:
        (advantages [T], returns [T]); 0 on tokens that are not trained on.

    Source: arXiv 1506.02438, eq. 16; slime/utils/ppo_utils.py `get_advantages_and_returns_batch`, which counts
    an environment's tokens as steps of the policy; verl `compute_gae_advantage_return`, which does not, but
    whitens (here `normalize_advantages`).
    """
    positions, offsets = trained_tokens(view.loss_mask, view.offsets)
    samples, last = ends(offsets)
    values = view.values.detach()[positions]
    after = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    after[last] = 0
    delta = gamma * after - values - kl[positions]
    delta[last] += view.rewards[samples]
    credited = discounted_sums(delta, offsets, discount=gamma * lambd)
    advantages = torch.zeros_like(kl).index_copy(0, positions, credited)
    returns = torch.zeros_like(kl).index_copy(0, positions, credited + values)
    return advantages, returns
