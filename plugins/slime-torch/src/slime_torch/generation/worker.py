"""The engine's thread: steps of the scheduler, and commands between them."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from slime_core.errors import EngineError, SlimeError
from slime_core.rundir.rundir import FILE_ALONE
from slime_core.runtime.openmp import release_threads

from slime_torch.generation.request import Request
from slime_torch.generation.scheduler import Scheduler

log = logging.getLogger(__name__)

#: Told, on the event loop, which requests are over, and the error if that is why.
Deliver = Callable[[Sequence[Request], EngineError | None], None]


class Worker:
    """Runs a scheduler in a thread of its own.

    After requests finish it waits until the event loop has dealt with them (`hand_over` with the right count):
    what their callers ask for next then joins the very next step, whatever the machine's timing.

    Args:
        loop: on which `deliver` is called.
        deliver: called for requests that are over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Deliver) -> None:
        self._loop, self._deliver = loop, deliver
        self._changed = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._inbox: list[Request] = []
        self._posted = self._acknowledged = 0
        self._holds: set[str] = set()
        self._refusal: EngineError | None = None
        self._closing = False
        self.scheduler: Scheduler | None = None
        """Set by the first command."""
        self._thread = threading.Thread(target=self._run, name="slime-torch", daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `command` in the thread, between two steps; returns the future of its result."""
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._changed:
            if self._closing:
                future.set_exception(_closed())
                return future
            self._commands.append((command, future))
            self._changed.notify()
        return future

    def hand_over(self, requests: Sequence[Request], *, delivered: int) -> None:
        """Submit requests, and say how many deliveries the event loop has dealt with."""
        with self._changed:
            self._inbox += requests
            self._acknowledged = delivered
            self._changed.notify()

    def hold(self, reason: str) -> None:
        """Make no further step until `release`. To be called in the thread, by a command."""
        self._holds.add(reason)

    def release(self, reason: str) -> None:
        """Take a hold back. To be called in the thread, by a command."""
        self._holds.discard(reason)

    def finish(self, requests: Sequence[Request], error: EngineError | None = None) -> None:
        """Deliver requests. To be called in the thread."""
        if requests:
            self._posted += 1
            self._loop.call_soon_threadsafe(self._deliver, requests, error)

    def refuse(self, requests: Sequence[Request], error: EngineError) -> None:
        """Answer requests, and what is submitted until `accept`, with `error`. To be called in the thread, by a command."""
        self._refusal = error
        self.finish(requests, error)

    def accept(self) -> None:
        """Take requests again after `refuse`. To be called in the thread, by a command."""
        self._refusal = None

    def end(self) -> None:
        """End the thread after its current step or command."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after its current step or command, and wait for it."""
        self.end()
        self._thread.join()

    def _busy(self) -> bool:
        return bool(self._inbox) or (self.scheduler is not None and self.scheduler.busy)

    def _ready(self) -> bool:
        may_step = not self._holds and self._acknowledged == self._posted
        return self._closing or bool(self._commands) or (self._busy() and may_step)

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._ready() and not self._busy():
                    release_threads()
                self._changed.wait_for(self._ready)
                commands, self._commands = self._commands, deque()
                if self._closing:
                    break
                requests, self._inbox = self._inbox, []
            if self._refusal is not None:
                self.finish(requests, self._refusal)
            elif self.scheduler is not None:
                self.scheduler.submit(requests)
            for command, future in commands:
                self._execute(command, future)
            if not commands and self.scheduler is not None:
                self._step(self.scheduler)
        for _, future in commands:
            self._loop.call_soon_threadsafe(_settle, future, None, _closed())

    def _step(self, scheduler: Scheduler) -> None:
        try:
            self.finish(scheduler.step())
        except Exception as error:  # the edge of the thread: whoever waits for an answer must get this one
            failure = EngineError(f"torch engine: a generation step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            log.error("%s", failure, exc_info=error, extra=FILE_ALONE)
            # What the step had computed is freed now, and not when the last caller drops its error.
            traceback.clear_frames(error.__traceback__)
            self.finish(scheduler.take_finished())
            self.finish(scheduler.recover(), failure)

    def _execute(self, command: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        result, failure = None, None
        try:
            result = command()
        except SlimeError as error:
            failure = error
        except Exception as error:  # as above
            failure = EngineError(f"torch engine: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._loop.call_soon_threadsafe(_settle, future, result, failure)


def _closed() -> EngineError:
    return EngineError("torch engine: closed")


def _settle(future: asyncio.Future[Any], result: Any, failure: Exception | None) -> None:
    if future.done():  # cancelled meanwhile
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)
