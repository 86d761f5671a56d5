"""Pass@k training: only the best sample of a group is credited, by how far it is ahead."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator


@estimator(reward_transform="pass-at-k")
def grpo_passk(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token of a sample what the reward transform `pass-at-k` makes of its reward.

    Source: arXiv 2503.19595, eq. 7.
    """
    return outcome(view, view.rewards, kl)
