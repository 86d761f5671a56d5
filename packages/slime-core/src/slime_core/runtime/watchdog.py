"""`Watchdog`: the thread that ends a command whose event loop is held up beyond a deadline, after saying by what.

Deadlines are kept by the event loop (`deadline.within`). Where something blocks the loop itself, nobody is left to keep
them: this thread is. And where something holds the whole interpreter (a call of native code that does not let go of it),
`faulthandler`, whose thread is not Python's, writes the stacks to the run's log and ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from slime_core.errors import DeadlineError, SlimeError, exit_status
from slime_core.runtime.processes.command_process import CommandProcess, say

logger = logging.getLogger(__name__)

#: Seconds beyond its deadline after which a block is overdue: the loop gets these to end what it cancels.
GRACE_S = 10.0
#: Seconds that this thread gets to act before the interpreter counts as held.
_HELD_S = 15.0


class Watchdog:
    """Ends the process when a deadline has passed and the event loop is blocked.

    Args:
        process: the process of the command; None where slime is a library of another program, which is never ended.
        loop: the event loop.
    """

    def __init__(self, process: CommandProcess | None, loop: asyncio.AbstractEventLoop) -> None:
        self._process, self._loop = process, loop
        self._changed = threading.Condition()
        self._running: dict[int, tuple[float, str]] = {}
        self._next = 0
        self._log: IO[str] | None = None
        self._is_on = self._closed = False
        self.last_words: Callable[[SlimeError], int] = exit_status
        """Told why before the process ends; returns the exit status."""

    def start(self, log: Path | None = None) -> None:
        """Begin to watch; `log` gets the stacks where the interpreter itself is held."""
        if self._process is None:
            return
        if log is not None:
            self._log = log.open("a", encoding="utf-8")
        with self._changed:
            self._is_on = True
            self._arm()
        threading.Thread(target=self._watch, name="slime-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End watching."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._process is not None:
            faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def watching(self, what: str, seconds: float) -> Iterator[None]:
        """Watch that the block ends within `seconds`, and some grace."""
        with self._changed:
            number, self._next = self._next, self._next + 1
            self._running[number] = (time.monotonic() + seconds + GRACE_S, what)
            self._arm()  # by this thread: it may hold the interpreter before another one runs
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._running.pop(number, None)
                self._arm()
                self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                at, what = min(self._running.values(), default=(float("inf"), ""))
                left = at - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if self._closed:
                return
        self._end(what)

    def _arm(self) -> None:
        """Have the process ended from outside of Python, should the thread that watches not come to it."""
        if not self._is_on or self._closed:
            return
        file = self._log or sys.__stderr__
        if not self._running:
            faulthandler.cancel_dump_traceback_later()
        elif file is not None:
            left = min(self._running.values())[0] - time.monotonic()
            faulthandler.dump_traceback_later(max(left, 0.0) + _HELD_S, exit=True, file=file)

    def _end(self, what: str) -> None:
        assert self._process is not None
        status = 1
        try:
            where = held_by(self._loop)
            error = f"{what}: overdue, and the event loop is held by {where}"
            logger.error("%s\n%s", error, stacks(self._loop), extra={"file_alone": True})
            log = "" if self._log is None else f"\n  stacks: {self._log.name}"
            say(f"\nslime: {error}{log}\n")
            status = self.last_words(DeadlineError(error))
        finally:
            self._process.end(status)


#: The watchdog of the current run.
WATCHDOG: ContextVar[Watchdog | None] = ContextVar("slime_watchdog", default=None)


def watching(what: str, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Have the watchdog, if there is one, end the process when the block takes longer."""
    watchdog = WATCHDOG.get()
    return contextlib.nullcontext() if watchdog is None else watchdog.watching(what, seconds)


def held_by(loop: asyncio.AbstractEventLoop) -> str:
    """Say what a loop is busy with: its current task, and the line that is being executed."""
    task = asyncio.current_task(loop)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where = "" if frame is None else f" ({_innermost(traceback.extract_stack(frame))})"
    return f"{'a callback' if task is None else task.get_name()}{where}"


def where_of(task: asyncio.Task[object]) -> str:
    """Say by name what a task is, and where it waits."""
    line = line_of(task)
    return f"{task.get_name()} ({line})" if line else task.get_name()


def line_of(task: asyncio.Task[object]) -> str:
    """Return where a task waits, `FILE:LINE in NAME`: the innermost line that is not the standard library's; empty if it is done."""
    frames = task.get_stack()
    coroutine: object = task.get_coro()
    lines = []
    while coroutine is not None and (frame := getattr(coroutine, "cr_frame", None)) is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        coroutine = getattr(coroutine, "cr_await", None)
    if not lines and frames:
        lines = [f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}"]
    return _own(lines) if lines else ""


def stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Return the stacks of all threads and of all tasks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    with contextlib.suppress(RuntimeError):  # the loop runs meanwhile
        parts += [f"task {where_of(task)}" for task in asyncio.all_tasks(loop)]
    return "\n".join(parts)


def _innermost(stack: traceback.StackSummary) -> str:
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _own(lines: list[str]) -> str:
    """Return the innermost line that is not the standard library's."""
    standard = str(Path(asyncio.__file__).parents[1])
    mine = [line for line in lines if not line.startswith(standard) or "site-packages" in line]
    return (mine or lines)[-1]
