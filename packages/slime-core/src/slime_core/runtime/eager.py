"""Starting coroutines at once: one that never waits is done without a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextvars import Context
from typing import Any


def start_now[T](
    work: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
) -> asyncio.Task[T]:
    """Return the task of a coroutine that has run up to its first wait, or to its end; in a copy of the caller's context
    where it is given none."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), name=name, context=context, eager_start=True)


async def results[T](tasks: Iterable[asyncio.Task[T]]) -> list[T]:
    """Return the results of tasks, in order, as `asyncio.gather` does; at once where all are done.

    Raises:
        BaseException: what the first task that failed raised.
    """
    given = list(tasks)
    if all(task.done() and not task.cancelled() and task.exception() is None for task in given):
        return [task.result() for task in given]
    return await asyncio.gather(*given)
