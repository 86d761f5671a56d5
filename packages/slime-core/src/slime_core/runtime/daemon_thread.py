"""`DaemonThread`: a thread that the end of the process does not wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any


class DaemonThread(Executor):
    """Runs calls one after the other in one thread, which starts with the first call.

    Python joins the threads of a `ThreadPoolExecutor` when it ends: a collective that hangs would keep the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit[**P, T](self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have `fn` called, and return the future of its result."""
        if self._closed:
            raise RuntimeError(f"the thread {self._name} was shut down")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls. Queued calls still run; `cancel_futures` cancels those that have not begun."""
        self._closed = True
        while cancel_futures and not self._calls.empty():
            with contextlib.suppress(Empty):  # the thread was faster
                if (call := self._calls.get_nowait()) is not None:
                    call[0].cancel()
        self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            _make(*call)
            del call  # what it holds is not needed until the next one comes


def _make(future: Future[Any], function: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = function()
        except BaseException as error:  # the edge of the thread: whoever waits gets it
            future.set_exception(error)
        else:
            future.set_result(result)
