"""The signatures of rewards and reward transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Scores one sample; sync or async. Keyword-only parameters are options, filled from `rm_args`. Or a class that takes the
#: options, whose objects score. Returns a number, a `rewards.results.Grade`, or a dict of JSON values.
RewardFn = Callable[..., Any]
#: Scores a whole group at once, in order; sync or async.
GroupRewardFn = Callable[..., Any]
#: (raw_rewards_N float64, group_ids_N int64, *, options) -> rewards_N float64
RewardTransform = Callable[..., "NDArray[np.float64]"]
