"""Work that may take so long, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from slime_core.errors import DeadlineError


async def within[T](seconds: float, what: str, work: Awaitable[T]) -> T:
    """Return what `work` returns.

    Raises:
        DeadlineError: `what` was not done in time; the work was cancelled.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        missed = DeadlineError(f"{what}: not done after {seconds:g} s")
        for note in getattr(error.__cause__, "__notes__", ()):  # of the work that was cancelled
            missed.add_note(note)
        raise missed from error
