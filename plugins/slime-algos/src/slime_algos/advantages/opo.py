"""On-policy optimisation with the optimal reward baseline: the group's mean reward, weighed by length."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator
from slime_algos.terms.sample_sums import sample_sums
from slime_algos.terms.sums_by_id import SumsById


@estimator(reward_transform="raw", reads={"group_ids"})
def opo(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token of a sample its reward less b = Σ l_i r_i / Σ l_i over its group, l the trained tokens.

    The baseline of least variance where a sample's squared gradient grows with its length. A group of one gets 0;
    verl gives it the bare reward.

    Args:
        view: reads `rewards`, `group_ids`, `loss_mask`, `offsets`.
        kl: [T] penalty of each token.

    Source: OPO, arXiv 2505.23585, eq. 7.
    """
    lengths = sample_sums(view.loss_mask, view.offsets)
    groups = SumsById(view.group_ids)
    ahead = groups.ahead_of_first(view.rewards)
    return outcome(view, ahead - groups.total(lengths * ahead) / groups.total(lengths).clamp(min=1), kl)
