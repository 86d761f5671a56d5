"""Timers and spans of a user's own functions: they are timed and told to the log, and cost nothing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)


class Timer:
    """Sums of the seconds of named blocks, of one object."""

    def __init__(self) -> None:
        self.timers: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Begin a block."""
        self._begun[name] = time.perf_counter()

    def end(self, name: str) -> None:
        """End it."""
        seconds = time.perf_counter() - self._begun.pop(name)
        self.timers[name] = self.timers.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Time a block."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)

    def log_dict(self) -> dict[str, float]:
        """Return the sums."""
        return dict(self.timers)


def timer(name_or_function: Any) -> Any:
    """Time a function, or a block, `with timer(name):`, and tell the log."""
    if callable(name_or_function):
        return trace_function(name_or_function)
    return trace_span(None, str(name_or_function))


class TimedSpan(dict[str, Any]):
    """What is known of a block: attributes, which go to the log at its end."""

    set_attr = dict.__setitem__


@contextlib.contextmanager
def trace_span(
    target: Any = None, name: str = "", attrs: Mapping[str, Any] | None = None, **_: Any
) -> Iterator[TimedSpan]:
    """Tell the log how long a block took, and what it says of itself by `span.update(...)`."""
    begin, span = time.perf_counter(), TimedSpan(attrs or {})
    try:
        yield span
    finally:
        logger.debug("%s: %.3f s %s", name, time.perf_counter() - begin, dict(span))


def bind_trace(sample: Any, *_: Any, **__: Any) -> Any:
    """Return the sample: spans need nothing that is bound to it."""
    return sample


def build_sglang_meta_trace_attrs(meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and words of an engine's `meta_info`, which a span may be told."""
    return {name: value for name, value in meta_info.items() if isinstance(value, int | float | str)}


def trace_event(target: Any = None, name: str = "", **more: Any) -> None:
    """Tell the log that something happened."""
    logger.debug("%s %s", name, more)


def trace_function(function: Any = None, *, name: str | None = None, **_: Any) -> Callable[..., Any]:
    """Tell the log how long each call of a function took."""
    if function is None or isinstance(function, str):
        return functools.partial(trace_function, name=name or function)
    label = name or function.__qualname__

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with trace_span(None, label):
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with trace_span(None, label):
            return await function(*args, **kwargs)

    return awaited if inspect.iscoroutinefunction(function) else timed
