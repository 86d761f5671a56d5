"""GDPO: each part of a reward is normalised within its group by itself, and then they are added up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from slime_core.errors import TrainerError
from slime_core.protocols import TokenView
from torch import Tensor

from slime_algos.advantages.outcome import outcome
from slime_algos.decorators.estimator import estimator


@estimator(reward_transform="group-norm", reward_parts=lambda options: options.get("gdpo_weights", ()))
def gdpo(
    view: TokenView, kl: Tensor, *, gdpo_weights: Mapping[str, float] = MappingProxyType({})
) -> tuple[Tensor, Tensor]:
    """Give every token of a sample the weighted sum of its group-normalised parts.

    Two answers whose parts add up to the same score differ, and a part that varies little counts as much as one that
    varies a lot; of the score itself nothing is read. What comes after the sum is whitening, `normalize_advantages`:
    it keeps the scale of advantages the same for any number of parts. A part on which a group agrees gives it 0.

    Args:
        view: reads `reward_parts`, `sample_of_token`, `offsets`.
        kl: [T] penalty of each token.
        gdpo_weights: part -> weight.

    Raises:
        TrainerError: `gdpo_weights` names no part.

    Source: GDPO, arXiv 2601.05242; verl `compute_gdpo_outcome_advantage`, whose weights are 1 unless given, which
    whitens always, and gives a group of one the bare parts.
    """
    if not gdpo_weights:
        raise TrainerError("gdpo: gdpo_weights is empty; name parts of the reward, and the weight of each")
    weighted = [weight * view.reward_parts[name] for name, weight in gdpo_weights.items()]
    return outcome(view, torch.stack(weighted).sum(0), kl)
