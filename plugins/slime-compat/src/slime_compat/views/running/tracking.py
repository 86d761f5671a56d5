"""`log`: metrics of a log function, which go where the run's go."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

_METRICS: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("slime_compat_metrics")


@contextlib.contextmanager
def logging_to(metrics: dict[str, Any]) -> Iterator[None]:
    """Let `log` add to these metrics in the block."""
    token = _METRICS.set(metrics)
    try:
        yield
    finally:
        _METRICS.reset(token)


def log(args: Any, metrics: Mapping[str, Any], step_key: str = "") -> None:
    """Add numbers to the metrics of the step that a log function is called for; elsewhere they go to the log as text.

    Args:
        args: of the run.
        metrics: name -> number; what is none is left out.
        step_key: name of the step's number, which the run knows.
    """
    held = _METRICS.get(None)
    if held is None:
        logger.info("%s", dict(metrics))
        return
    numbers = {
        name: value for name, value in metrics.items() if isinstance(value, int | float) and name != step_key
    }
    held.update({name: float(value) for name, value in numbers.items()})


def configure_logger(prefix: str = "") -> None:
    """Do nothing: the run has set logging up."""
