"""`Stop`: ending a run before its last step, at a point from which it can be resumed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Iterator
from typing import Any

from slime_core.errors import Interrupted, RunError
from slime_core.runtime.deadline import CANCEL_S, Work
from slime_core.runtime.watchdog import Watchdog

#: Seconds that the event loop has to react to a signal while it is in no block that may delay the end (`Stop.held`).
_NOTICE_S = 10.0


class Stop:
    """Cancels the work of a run when a signal arrives or another part of the process fails. Belongs to one event loop.

    Training, weight sync and saving run inside `held` and are not cancelled: no run could resume from half of one.
    """

    def __init__(self) -> None:
        self._cause: Interrupted | RunError | None = None
        self._asked = asyncio.Event()
        self._work: Work[Any] | None = None
        self._holds = 0

    @property
    def cause(self) -> Interrupted | RunError | None:
        """Why the run is to end; None if it is not."""
        return self._cause

    @property
    def is_held(self) -> bool:
        """Whether the run is inside a block that is not cancelled."""
        return self._holds > 0

    def note(self, cause: Interrupted | RunError) -> None:
        """Record why the run is to end; the first cause counts."""
        self._cause = self._cause or cause

    def ask(self, cause: Interrupted | RunError) -> None:
        """Ask the run to end. Call it on the event loop."""
        self.note(cause)
        self._asked.set()
        self._cut()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay the end of the run until the block is done. The block has a deadline of its own.

        Raises:
            CancelledError: the run was asked to end before the block began.
        """
        if self._cause is not None and self._work is not None and not self._holds:
            raise asyncio.CancelledError  # what `_cut` asked for would be heard in the midst of the block
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._cut()

    async def obey[T](self, what: str, work: Awaitable[T]) -> T:
        """Return what `work` returns, or cancel it when the run is asked to end.

        Raises:
            Interrupted: a signal arrived. The work has ended, or was abandoned because it ignores its cancellation.
            RunError: another part of the process asked for the end.
        """
        self._work = running = Work(what, work)
        asked = asyncio.create_task(self._asked.wait())
        try:
            if self._cause is not None:
                self._cut()
            await asyncio.wait({running.task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not running.task.done():
                assert self._cause is not None
                await self._ended(running)
                raise self._cause
            if running.task.cancelled() and self._cause is None:
                raise RunError(
                    f"{what}: was cancelled by itself; a plugin raised CancelledError, or cancelled the run's task"
                )
            return running.task.result()
        except asyncio.CancelledError:
            await running.end()
            if self._cause is not None:
                raise self._cause from None
            raise
        finally:
            asked.cancel()
            self._work = None

    def _cut(self) -> None:
        if self._cause is not None and self._work is not None and not self._holds:
            self._work.task.cancel()

    async def _ended(self, running: Work[Any]) -> None:
        """Wait until the cancelled work has ended; abandon it if it ignores its cancellation."""
        while not running.task.done():
            was_held = self.is_held
            await asyncio.wait({running.task}, timeout=CANCEL_S)
            if not running.task.done() and not was_held and not self.is_held:
                for hung in await running.end():
                    assert self._cause is not None
                    self._cause.add_note(f"{hung} does not end when it is cancelled")
                return
        if not running.task.cancelled() and (error := running.task.exception()) is not None:
            assert self._cause is not None
            self._cause.add_note(f"while it ended: {type(error).__name__}: {error}")


class Listener:
    """Passes a signal from the main thread to the `Stop` of the run on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stop: Stop, watchdog: Watchdog) -> None:
        self._loop, self._stop, self._watchdog = loop, stop, watchdog
        self._noticing = contextlib.ExitStack()

    def hear(self, number: int) -> None:
        """Ask the run to end; the watchdog ends the process if the event loop does not react in time."""
        name = signal.Signals(number).name
        self._stop.note(Interrupted(number))
        if not self._stop.is_held:
            self._noticing.enter_context(self._watchdog.watching(name, _NOTICE_S))
        self._loop.call_soon_threadsafe(self._note, number)

    def _note(self, number: int) -> None:
        self._noticing.close()
        self._stop.ask(Interrupted(number))
