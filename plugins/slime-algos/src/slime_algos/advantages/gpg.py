"""Group policy gradient: centred rewards, scaled up for the samples that earned nothing."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator


@estimator(reward_transform="gpg", loss="policy_gradient_loss")
def gpg(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token of a sample what the reward transform `gpg` makes of its reward.

    Source: GPG, arXiv 2504.02546, eq. 6; its scale is verl's, see `reward_transforms.gpg`.
    """
    return outcome(view, view.rewards, kl)
