"""Deadlines for awaitables, kept also where the work ignores its cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import sys
from collections.abc import Awaitable
from contextvars import ContextVar

from slime_core.errors import DeadlineError
from slime_core.runtime.calls import open_calls, tell_both_ends
from slime_core.runtime.clock import now
from slime_core.runtime.watchdog import watching, where_of

logger = logging.getLogger(__name__)

#: Seconds that cancelled work has for its own clean-up.
CANCEL_S = 5.0
#: The marks of the works that a task is part of: tasks that it starts are part of them, too.
_PARTS_OF: ContextVar[tuple[object, ...]] = ContextVar("slime_work", default=())
#: The nearest deadline of a work, by the clock of its loop.
_ENDS_AT: ContextVar[float] = ContextVar("slime_deadline", default=math.inf)


#: Coroutines that ignore their own end: finalising one would run it again, for ever. They go with the process.
_LEFT_BEHIND: list[object] = []


class Work[T]:
    """An awaitable as a task that can be ended together with all tasks that it started."""

    def __init__(self, what: str, work: Awaitable[T], *, seconds: float = math.inf) -> None:
        # Not the work itself: with the task, which holds its context, it would keep the result until cycles are collected.
        self._mark = object()
        context = contextvars.copy_context()
        context.run(_PARTS_OF.set, (*_PARTS_OF.get(), self._mark))
        context.run(_ENDS_AT.set, min(_ENDS_AT.get(), now() + seconds))
        self.task = asyncio.create_task(_awaited(work), name=what, context=context)

    def parts(self) -> list[asyncio.Task[object]]:
        """Return the tasks that are part of it."""
        return [task for task in asyncio.all_tasks() if self._mark in _works_of(task)]

    async def end(self) -> list[str]:
        """Cancel the work; returns what did not end within `CANCEL_S`, each by its name and where it waits.

        That is ended as a generator is, by closing it. What withstands that, too, is left behind, and is not waited for.
        """
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=CANCEL_S)
        parts = self.parts()
        if self.task.done():
            _retrieve(self.task)
            parts = [task for task in parts if task.cancelling()]
            if parts:
                await asyncio.wait(parts, timeout=CANCEL_S)
        return await close_tasks([task for task in parts if not task.done()])


async def within[T](
    seconds: float,
    what: str,
    work: Awaitable[T],
    *,
    waits_for_others: bool = False,
    missed: type[DeadlineError] = DeadlineError,
) -> T:
    """Return what `work` returns within a deadline. It runs in a task of its own.

    Args:
        seconds: the deadline.
        what: how messages call the work.
        work: what is done.
        waits_for_others: whether it waits for tasks that it did not start, too.
        missed: what is raised.

    Raises:
        DeadlineError: `what` was not done in time; the work was cancelled, or given up. Says which processes did not answer
            it, where they are, and what did not end.
    """
    with watching(what, seconds):
        running = Work(what, work, seconds=seconds)
        try:
            await asyncio.wait({running.task}, timeout=seconds)
        except asyncio.CancelledError as error:
            for hung in await running.end():
                error.add_note(f"{hung} does not end when it is cancelled")
            await _copy_notes(running.task, error)
            raise
        if running.task.done():
            return running.task.result()
        late = missed(f"{what}: not done after {seconds:g} s")
        tasks = asyncio.all_tasks() if waits_for_others else running.parts()
        for note in await tell_both_ends(str(late), open_calls(tasks)):
            late.add_note(note)
        for hung in await running.end():
            late.add_note(f"{hung} does not end when it is cancelled")
        await _copy_notes(running.task, late)
        raise late


def seconds_left() -> float | None:
    """Return how long whoever calls has until the nearest deadline that it runs under (`within`); None where there is none."""
    ends_at = _ENDS_AT.get()
    return None if math.isinf(ends_at) else ends_at - now()


async def close_tasks(tasks: list[asyncio.Task[object]]) -> list[str]:
    """End tasks that ignore their cancellation. Returns the name of each and the line where it waited, innermost tasks only."""
    waited_for = [(task, where_of(task)) for task in tasks if not task.done()]
    leaves = [where for task, where in waited_for if not _waits_for_tasks(task)]
    hung = leaves or [where for _, where in waited_for]
    for where in hung:
        logger.error("%s does not end when it is cancelled", where, extra={"file_alone": True})
    before, sys.unraisablehook = (
        sys.unraisablehook,
        lambda _: None,
    )  # a coroutine that ignores its end is told above
    for task, _ in waited_for:
        coroutine = task.get_coro()
        with contextlib.suppress(BaseException):  # it may raise anything
            if coroutine is not None:
                coroutine.close()
        task.cancel()
        task.add_done_callback(_retrieve)
    sys.unraisablehook = before
    if waited_for:
        _, pending = await asyncio.wait([task for task, _ in waited_for], timeout=1.0)
        _LEFT_BEHIND.extend((task, task.get_coro()) for task in pending)
    return hung


async def _awaited[T](work: Awaitable[T]) -> T:
    return await work


def _works_of(task: asyncio.Task[object]) -> tuple[object, ...]:
    return task.get_context().get(_PARTS_OF, ())


def _waits_for_tasks(task: asyncio.Task[object]) -> bool:
    """Say whether a task waits for other tasks, as in `gather` and `wait`, rather than for something itself."""
    names = []
    coroutine: object = task.get_coro()
    while coroutine is not None and (frame := getattr(coroutine, "cr_frame", None)) is not None:
        names.append(frame.f_code.co_name)
        coroutine = getattr(coroutine, "cr_await", None)
    waiter = getattr(task, "_fut_waiter", None)
    return (
        isinstance(waiter, asyncio.Task)
        or type(waiter).__name__ == "_GatheringFuture"
        or names[-1:] == ["_wait"]
    )


def _retrieve(task: asyncio.Task[object]) -> None:
    """Retrieve a task's exception, so that asyncio does not log that it was never retrieved."""
    if not task.cancelled():
        task.exception()


async def _copy_notes[T](task: asyncio.Task[T], error: BaseException) -> None:
    """Copy the notes of work that has ended."""
    if task.done():
        try:
            await task
        except BaseException as ended:  # the work's own, which is told already
            for note in getattr(ended, "__notes__", ()):
                error.add_note(note)
