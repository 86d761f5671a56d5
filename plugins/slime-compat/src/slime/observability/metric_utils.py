"""Statistics of rewards and samples."""

from slime.utils.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)

__all__ = [
    "compute_pass_rate",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]
