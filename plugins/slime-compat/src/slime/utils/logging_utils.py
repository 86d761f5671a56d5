"""Logging: the run has set it up; metrics go where the run's go."""

from slime_compat.views.tracking import log


def configure_logger(prefix: str = "") -> None:
    """Do nothing."""


__all__ = ["configure_logger", "log"]
