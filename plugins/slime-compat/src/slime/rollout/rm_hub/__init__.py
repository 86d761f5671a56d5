"""Rewards."""

from slime_compat.views.grading import async_rm, batched_async_rm

__all__ = ["async_rm", "batched_async_rm"]
