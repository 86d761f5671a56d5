"""math-verify without its own limits, which use signals and so fail outside the main thread.

Who calls these bounds what is worked out (`magnitude`) and for how long (`limit`). Importing this takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import math_verify


def parse(text: str, extraction: Sequence[Any]) -> list[Any]:
    """Return the answers that math-verify reads in `text`: sympy objects, and as a last resort the text itself."""
    with _without_warning():
        found: list[Any] = math_verify.parse(text, extraction, parsing_timeout=None)
    return found


def verify(wanted: Sequence[Any], given: Sequence[Any]) -> bool:
    """Return whether math-verify takes two answers for the same."""
    with _without_warning():
        return bool(math_verify.verify(wanted, given, timeout_seconds=None))


@contextmanager
def _without_warning() -> Iterator[None]:
    """Keep back the library's warning, once a process, that a call without its limit needs another."""
    loggers = [logging.getLogger(f"math_verify.{module}") for module in ("parser", "grader")]
    for logger in loggers:
        logger.addFilter(_is_no_timeout_warning)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_no_timeout_warning)


def _is_no_timeout_warning(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Timeout is disabled")
