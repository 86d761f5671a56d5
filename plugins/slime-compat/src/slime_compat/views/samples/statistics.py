"""Statistics of rewards and samples, as `slime.utils.metric_utils` names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from slime_core.errors import DataError
from slime_core.run.metrics import pass_rates


def dict_add_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a dict with a prefix before each key."""
    return {f"{prefix}{name}": value for name, value in values.items()}


def compute_statistics(values: Iterable[float]) -> dict[str, float]:
    """Return mean, median, max and min of numbers."""
    array = np.asarray(list(values), dtype=np.float64)
    return {name: float(getattr(np, name)(array)) for name in ("mean", "median", "max", "min")}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """Return pass@k for powers of two: how often one of k samples has the reward 1.

    Raises:
        DataError: the rewards do not make whole groups.
    """
    n = len(flat_rewards)
    if group_size < 1 or n % group_size or (num_groups is not None and n != group_size * num_groups):
        raise DataError(f"{n} rewards do not make groups of {group_size}")
    groups = [flat_rewards[place : place + group_size] for place in range(0, n, group_size)]
    return pass_rates([[one == 1 for one in group] for group in groups])


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """Return the step of a rollout on the axis of its metrics."""
    return rollout_id
