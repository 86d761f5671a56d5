"""REINFORCE leave-one-out: the baseline of a sample is the mean reward of the others of its group."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator


@estimator(reward_transform="leave-one-out")
def rloo(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token of a sample its reward less the mean of its group's other rewards.

    A group of one gets 0; verl gives it the bare reward.

    Source: arXiv 2402.14740, section 3.3.
    """
    return outcome(view, view.rewards, kl)
