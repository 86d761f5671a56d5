"""Statistics of rewards and samples."""

from slime_compat.views.samples.statistics import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
)
from slime_core.run.metrics import has_repetition

__all__ = [
    "compute_pass_rate",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]
