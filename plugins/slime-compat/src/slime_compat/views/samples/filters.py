"""The filters of `slime.rollout.filter_hub`: whether rewards of a group differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_compat.views.samples.outputs import DynamicFilterOutput
from slime_compat.views.samples.sample import ReferenceSample as Sample

#: Smallest standard deviation of rewards that differ.
SMALLEST = 1e-6


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = bool(np.std(np.asarray(rewards, dtype=np.float64), ddof=1) > SMALLEST)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Sample], **_: Any
) -> DynamicFilterOutput:
    """Keep a group whose rewards differ, and others where they would have to be replaced by sampling again."""
    answer = check_reward_nonzero_std(args, samples)
    return DynamicFilterOutput(keep=answer.keep, reason=answer.reason, keep_when_insufficient=True)
