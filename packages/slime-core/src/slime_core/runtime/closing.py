"""Closing the parts of a run: all are closed even if one fails, and the error that ended the run is kept."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Awaitable, Iterator, Sequence
from typing import Protocol

from slime_core.runtime.deadline import within

#: Seconds that a part has to close, and a tracker or plugin to take note of the end.
CLOSE_S = 30.0
TELL_S = 40.0

logger = logging.getLogger(__name__)


class Closes(Protocol):
    """A part that is closed at the end: of a run's own parts every one, of a user's (a generator, an async reward, a sample hook, a service) those
    that have this method."""

    def close(self) -> Awaitable[None] | None:
        """Stop, and free everything. A user's part may do so without `async`."""


async def close_part(part: object) -> None:
    """Close a part of a user's, if it has a method `close`, with `async` or without."""
    close = getattr(part, "close", None)
    closing = close() if close is not None else None
    if inspect.isawaitable(closing):
        await closing


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Log an error of the block as what failed, instead of raising it."""
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the run has its outcome by now
        logger.exception("at the end of the run: %s: %s", what, error)


async def close_all(parts: Sequence[Closes]) -> None:
    """Close every part, the first one first; errors are logged. All are closed even if the task is cancelled meanwhile."""
    async with contextlib.AsyncExitStack() as stack:
        for part in reversed(parts):
            stack.push_async_callback(_close, part)


async def _close(part: Closes) -> None:
    with logged(f"{type(part).__name__} was not closed"):
        await within(CLOSE_S, f"closing {type(part).__name__}", close_part(part))
