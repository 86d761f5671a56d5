"""Supervised data as a rollout."""

from slime_compat.views.generating.rollout import sft_rollout as generate_rollout

__all__ = ["generate_rollout"]
