"""Logging: the run has set it up."""


def configure_logger(prefix: str = "") -> None:
    """Do nothing."""


__all__ = ["configure_logger"]
