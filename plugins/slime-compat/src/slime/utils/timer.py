"""Times of blocks, for the log."""

from slime_compat.views.running.timing import Timer, timer

__all__ = ["Timer", "timer"]
