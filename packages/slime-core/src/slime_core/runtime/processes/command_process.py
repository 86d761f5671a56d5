"""`CommandProcess`: the process of a `slime` command: how signals reach it, and how it ends.

Signals are heard by a thread, by way of `signal.set_wakeup_fd`: it says so at once, also while the main thread is inside a
long call of native code, where Python's own handlers have to wait.

The process ends without finalising the interpreter. A thread that is inside native code at that moment (of torch, of Ray,
of a plugin) would be unwound through frames that do not expect it, which ends in `terminate called without an active
exception`; and a thread that is no daemon would be waited for without a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import NoReturn

from slime_core.errors import Interrupted
from slime_core.runtime.processes.tree import children_of

#: Signals that ask a command to end. One that is ignored when the command begins, as under `nohup`, stays ignored.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: Seconds in which the same key press may arrive twice, from the terminal and from a parent that passes it on.
_ECHO_S = 0.2
#: Seconds that exit handlers of other modules may take, and that children have to be gone.
_EXIT_HANDLERS_S = 5.0
_CHILDREN_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class CommandProcess:
    """This process, where a `slime` command owns it."""

    def __init__(self) -> None:
        self._listener: Callable[[int], None] | None = None
        self._last_words: Callable[[int], object] = lambda signum: None
        self._heard_at: float | None = None
        self.is_ending = False
        """Whether it has begun to kill the processes below, none of which is to be started again."""

    @contextlib.contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """Hear signals in the block: the first asks to end, the second ends the process at once. On the main thread."""
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        read, write = os.pipe()
        os.set_blocking(write, False)
        before_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._handle) for number in heard}
        threading.Thread(target=self._hear, args=(read,), name="slime-signals", daemon=True).start()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_fd)
            os.close(write)

    @contextlib.contextmanager
    def tells(self, listener: Callable[[int], None], last_words: Callable[[int], object]) -> Iterator[None]:
        """Tell `listener` of the first signal, in the main thread, instead of raising `Interrupted` there.

        Args:
            listener: gets the number of the signal.
            last_words: called, on another thread, with the number of the signal that ends the process at once.
        """
        before = self._listener, self._last_words
        self._listener, self._last_words = listener, last_words
        try:
            yield
        finally:
            self._listener, self._last_words = before

    def end(self, status: int) -> NoReturn:
        """End now with this exit status: processes below are killed, temporary folders deleted. From any thread."""
        self.is_ending = True
        with contextlib.suppress(Exception):
            end_children(_CHILDREN_S)
        _call(weakref.finalize._exitfunc, "slime-clean")  # type: ignore[attr-defined]  # what `tempfile` deletes folders by
        if os.isatty(1):
            say("\x1b[?25h", descriptor=1)  # a progress bar hides the cursor
        os._exit(status)

    def leave(self, status: int) -> NoReturn:
        """End in an orderly way: exit handlers first, as far as they end in time, then what is printed is flushed."""
        _call(atexit._run_exitfuncs, "slime-exit")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or its reader is gone
                stream.flush()
        self.end(status)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python's own handler, on the main thread."""
        if self._listener is None:
            raise Interrupted(number)
        self._listener(number)

    def _hear(self, descriptor: int) -> None:
        while numbers := os.read(descriptor, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._heard(number)
        os.close(descriptor)

    def _heard(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self._heard_at is None:
            self._heard_at = now
            say(f"\n{name}: stopping; what is done is saved first; once more ends at once\n")
        elif now - self._heard_at > _ECHO_S:
            say(f"\n{name}: ending at once\n")
            with contextlib.suppress(Exception):
                self._last_words(number)
            self.end(128 + number)


#: The command of this process; None where slime is a library of another program.
COMMAND: ContextVar[CommandProcess | None] = ContextVar("slime_command", default=None)


def say(text: str, *, descriptor: int = 2) -> None:
    """Write to the terminal directly: another thread may hold the lock of Python's streams, or have closed them."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode(errors="replace"))


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (Linux child subreaper), so that `end_children` finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(seconds: float) -> None:
    """Kill every descendant process, repeatedly until none is left, for at most so many seconds."""
    deadline = time.monotonic() + seconds
    while (below := children_of(os.getpid())) and time.monotonic() < deadline:
        for child in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)  # not a wait without end: orphans of those that were killed come up to be killed


def _call(function: Callable[[], object], name: str) -> None:
    """Call foreign clean-up on a thread, and wait for a while."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.start()
    thread.join(_EXIT_HANDLERS_S)
