"""Metrics that user code hands over: what is no number is refused there, before a file of the run holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.errors import PluginError
from slime_core.protocols import Metrics

#: What Python makes a float of, and is none.
_TEXT = (str, bytes, bytearray)


def given_metrics(metrics: Any, *, who: str) -> Metrics:
    """Return metrics that user code gave, as floats: numbers of Python, and of NumPy, torch or any other library; NaN is one.

    Args:
        metrics: name -> number.
        who: gave them, as messages call it.

    Raises:
        PluginError: one is no number, or has a name that it cannot have; says whose, and which.
    """
    if not isinstance(metrics, Mapping):
        raise PluginError(f"{who}: found {_kind(metrics)}; wanted a dict, metrics by their names")
    found: Metrics = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or name == "step":
            raise PluginError(f"{who}: found a metric of the name {name!r}; wanted text other than 'step'")
        try:
            number = None if isinstance(value, _TEXT) else float(value)
        except Exception:  # whatever an object of somebody else's raises that is no number
            number = None
        if number is None:
            raise PluginError(f"{who}: found the metric {name!r} as {_kind(value)}; wanted a number")
        found[name] = number
    return found


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
