"""Logging: the run has set it up; metrics go where the run's go."""

from slime.utils.logging_utils import configure_logger, log

__all__ = ["configure_logger", "log"]
