"""On-policy optimisation with the optimal reward baseline: the group's mean reward, weighed by length."""

from __future__ import annotations

from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator
from slime_algos.terms.sample_sums import sample_sums


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
    same = (view.group_ids[:, None] == view.group_ids[None, :]).to(lengths.dtype) * lengths
    # Measured from the sample's own reward, a group of equal rewards gets exactly 0.
    ahead = view.rewards[:, None] - view.rewards[None, :]
    return outcome(view, (same * ahead).sum(1) / same.sum(1).clamp(min=1), kl)
