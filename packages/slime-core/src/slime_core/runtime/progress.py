"""Progress lines on the terminal: log records that are marked for it."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import TextIO

#: `extra` of a record that a command shows as it happens.
ON_TERMINAL = {"on_terminal": True}


class _Lines(logging.Handler):
    """Writes a line for each marked record, with the seconds since the command began."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.INFO)
        self._stream, self._began = stream, time.perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; errors of a closed terminal are ignored."""
        if getattr(record, "on_terminal", False):
            with contextlib.suppress(OSError, ValueError):
                print(f"{time.perf_counter() - self._began:6.1f} s  {record.getMessage()}", file=self._stream)
                self._stream.flush()


@contextlib.contextmanager
def telling(stream: TextIO | None = None) -> Iterator[None]:
    """Print marked log records while the block runs, on standard output if no other stream is given."""
    logger = logging.getLogger("slime_core")
    handler, level = _Lines(sys.stdout if stream is None else stream), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
