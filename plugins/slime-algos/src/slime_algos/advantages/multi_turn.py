"""Discounted return over turns: the earlier a turn, the less of the outcome it is credited with."""

from __future__ import annotations

import torch
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator
from slime_algos.terms.sample_sums import discounted_sums


@estimator(reward_transform="group-norm")
def multi_turn(view: TokenView, kl: Tensor, *, turn_discount: float = 1.0) -> tuple[Tensor, Tensor]:
    """Give every token of a turn turn_discount^(turns that follow it) times the sample's group-normalised reward.

    A turn is a run of trained tokens: what an environment writes parts two turns. 1 is `grpo`.

    Args:
        view: reads `rewards`, `loss_mask`, `offsets`, `sample_of_token`.
        kl: [T] penalty of each token.
        turn_discount: discount of a turn beside the one after it.

    Source: the discounted return of an episode whose steps are turns and whose one reward is the last (Sutton and
    Barto, 2018, eq. 3.8).
    """
    trained = view.loss_mask > 0
    begins = trained.clone()
    begins[1:] &= ~trained[:-1] | (view.sample_of_token[1:] != view.sample_of_token[:-1])
    begins = begins.to(kl.dtype)
    following = discounted_sums(begins, view.offsets, discount=1.0) - begins
    advantages, _ = outcome(view, view.rewards, torch.zeros_like(kl))
    penalties, _ = outcome(view, torch.zeros_like(view.rewards), kl)
    advantages = turn_discount**following * advantages + penalties
    return advantages, advantages
