"""Turn-level REINFORCE leave-one-out: the baseline of a turn is the mean return of the same turn of the group's others."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator

#: Key of `Sample.train_metadata`: which turn of its trajectory a sample is, from 0.
TURN = "turn"


@estimator(reward_transform="raw", reads={"group_ids"})
def trloo(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token of a turn its return less the mean return of that turn in the group's other trajectories.

    Each turn is a sample, whose reward is its return and whose `train_metadata` has `turn`; samples without it are turn 0, and where
    all are, this is `rloo`. A turn that no other trajectory of the group has gets 0.

    Args:
        view: reads `rewards`, `group_ids`, `train_metadata`.
        kl: [T] penalty of each token.

    Source: TRLOO of Dr. Kernel, arXiv 2602.05885; leaving a sample out of its own baseline keeps the gradient unbiased.
    """
    given = view.train_metadata or [None] * len(view.rewards)
    turns = view.group_ids.new_tensor([int((each or {}).get(TURN, 0)) for each in given])
    same = (view.group_ids[:, None] == view.group_ids[None, :]) & (turns[:, None] == turns[None, :])
    same.fill_diagonal_(False)
    # Measured from the sample's own reward, turns of equal returns get exactly 0.
    ahead = view.rewards[:, None] - view.rewards[None, :]
    others = same.to(ahead.dtype)
    return outcome(view, (others * ahead).sum(1) / others.sum(1).clamp(min=1), kl)
