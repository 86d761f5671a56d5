"""Metrics go where the run's go."""

from slime_compat.views.running.tracking import log

__all__ = ["log"]
