"""Logging: the run has set it up; metrics go where the run's go."""

from slime_compat.views.running.absent import lacking
from slime_compat.views.running.tracking import configure_logger, log

__all__ = ["configure_logger", "log"]
_TRACKERS = "the run starts and ends its trackers; use --use-wandb and its like"
__getattr__ = lacking(
    __name__,
    dict.fromkeys(("init_tracking", "finish_tracking", "update_tracking_open_metrics"), _TRACKERS),
)
