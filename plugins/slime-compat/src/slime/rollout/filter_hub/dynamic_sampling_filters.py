"""Filters of groups whose rewards say nothing."""

from slime_compat.views.samples.filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)

__all__ = ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"]
