"""Filters: which groups are worth training on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime_core.errors import SampleError
from slime_core.protocols import WeakReason
from slime_core.samples import Sample


def nonzero_std(
    group: Sequence[Sample],
    *,
    threshold: float = 1e-6,
    reward_key: str | None = None,
    keep_when_insufficient: bool = False,
) -> str | None:
    """Keep a group whose rewards differ; one of equal rewards has no advantage to learn from.

    Args:
        group: scored samples of one prompt, at least two.
        threshold: largest unbiased standard deviation of the rewards that counts as equal.
        reward_key: entry of a reward dict that is the score.
        keep_when_insufficient: keep it all the same where dropping it would mean to sample once more for the step.

    Returns:
        None to keep the group, or `zero_std_{reward}` with the common reward to one decimal.

    Raises:
        SampleError: the group has fewer than two samples, so that none could ever be kept.

    Source: DAPO (arXiv 2503.14476), dynamic sampling. slime/rollout/filter_hub/dynamic_sampling_filters.py
    drops groups of one for ever instead.
    """
    if len(group) < 2:
        who = group[0].name if group else "an empty group"
        raise SampleError(
            f"{who}: the filter nonzero-std sees a group of {len(group)}; wanted two or more: "
            "raise --n-samples-per-prompt, or drop the filter"
        )
    rewards = [sample.reward_value(reward_key) for sample in group]
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    if std > threshold:
        return None
    reason = f"zero_std_{round(mean, 1) + 0.0:.1f}"
    return WeakReason(reason) if keep_when_insufficient else reason
