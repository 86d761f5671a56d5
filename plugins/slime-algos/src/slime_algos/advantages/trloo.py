"""Turn-level REINFORCE leave-one-out: the baseline of a turn is the mean return of the same turn of the group's others."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator
from slime_algos.terms.sums_by_id import SumsById

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
    _, group = view.group_ids.unique(return_inverse=True)
    _, turn = group.new_tensor([int((each or {}).get(TURN, 0)) for each in given]).unique(return_inverse=True)
    alike = SumsById(group * len(turn) + turn)
    ahead = alike.ahead_of_first(view.rewards)
    others = (alike.total(ahead) - ahead) / (alike.size - 1).clamp(min=1)
    return outcome(view, ahead - others, kl)
