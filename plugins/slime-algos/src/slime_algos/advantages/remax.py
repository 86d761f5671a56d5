"""ReMax: the baseline of a prompt is the reward of its greedy response."""

from __future__ import annotations

from slime_core.errors import TrainerError
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator
from slime_algos.greedy_baseline import IS_BASELINE
from slime_algos.terms.sums_by_id import SumsById


@estimator(reward_transform="raw", reads={"group_ids"})
def remax(view: TokenView, kl: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token of a sample its reward less that of its group's greedy response.

    Baselines are the samples whose `train_metadata` has `is_baseline`; the generator `greedy-baseline` makes them. Where
    a group has several, their mean counts.

    Args:
        view: reads `rewards`, `group_ids`, `train_metadata`, `sample_of_token`.
        kl: [T] penalty of each token.

    Raises:
        TrainerError: a group has no baseline.

    Source: ReMax, arXiv 2310.10505, algorithm 2.
    """
    given = view.train_metadata or [None] * len(view.rewards)
    greedy = view.rewards.new_tensor([bool(each and each.get(IS_BASELINE)) for each in given])
    groups = SumsById(view.group_ids)
    count = groups.total(greedy)
    if (count == 0).any():
        lacking = int(view.group_ids[int((count == 0).nonzero()[0])])
        raise TrainerError(
            f"remax: group {lacking} has no sample to take the baseline from; "
            "generate with --custom-generate-function-path greedy-baseline"
        )
    return outcome(view, view.rewards - groups.total(greedy * view.rewards) / count, kl)
