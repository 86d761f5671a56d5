"""The guard: the process above a fork server, which kills all that a reward started and never runs foreign code.

Below it runs the fork server (`fork_server`), and below that the process that calls the reward (`worker`). The guard adopts
every process that the reward starts (also those that leave the worker's session, or whose parents die), and kills
them all as soon as the fork server ends, the pool closes the pipe, or the trainer is gone, however hard it was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from slime_core.runtime.processes.tree import children_of, descendants, marked

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ORPHAN_CHECK_MS = 1000
_LOOK_AGAIN_S = 0.001
_OUTSIDE_S = 2.0


def main(serve: Callable[[], None]) -> NoReturn:
    """Run the guard and, in a fork of it, `serve`. Descriptors 0 and 1 are pipes of jobs and replies."""
    trainer = os.getppid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    guard = os.getpid()
    fork_server = os.fork()  # this process has one thread
    if fork_server == 0:
        run_below(guard, serve)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # the pool reads the end of the replies when the fork server has ended
    ended = _watch(fork_server, trainer)
    killed = kill_all(
        fork_server
    )  # a fork server that was ending by itself has its own status, not that of the kill
    end_like(killed if ended is None else ended)


def run_below(parent: int, run: Callable[[], None]) -> NoReturn:
    """Call `run` in this fresh fork, in a session of its own, bound to die with its parent; then exit."""
    status = 1
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.setsid()
            signal.set_wakeup_fd(-1)  # what the parent waits with is not this process's
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run()
            status = 0
    except BrokenPipeError:  # the reader has ended
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)  # without the exit handlers of foreign modules, which may hang


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (Linux child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_like(status: int) -> NoReturn:
    """End this process as another ended, of which `status` is the wait status."""
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def cause_of_death(code: int) -> str:
    """Say how a process ended; `code` is its exit status, or minus the signal that killed it."""
    if code >= 0:
        return f"ended with exit status {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def threads() -> int:
    """Return the number of threads of this process, also of those that are not Python's."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # no /proc
        return threading.active_count()


def wake_on_child() -> int:
    """Return a descriptor that becomes readable whenever a child has ended. Once a process."""
    awake, wake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return awake


def reap(child: int) -> int | None:
    """Collect whatever children have ended; return the wait status of `child` when it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    return status


def kill_all(child: int) -> int:
    """Kill the group of `child`, then whatever is or becomes a child here. Returns the wait status of `child`."""
    status = 0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while True:
        try:
            for below in children_of(os.getpid()):
                os.kill(below, signal.SIGKILL)
            ended = os.waitpid(-1, os.WNOHANG)
            status = ended[1] if ended[0] == child else status
            if not ended[0]:
                time.sleep(_LOOK_AGAIN_S)  # not a wait without end: the next look may find more
        except ProcessLookupError:
            continue
        except (ChildProcessError, PermissionError):
            return status


def kill_from_outside(guard: int | None, mark: str) -> None:
    """Kill a guard that cannot do so itself with all below it, and all that has `mark` in its environment.

    Args:
        guard: its id; None when it has ended.
        mark: `NAME=value`, given to the guard as it started and so to all that did not throw it away.
    """
    own, until = os.getpid(), time.monotonic() + _OUTSIDE_S
    while time.monotonic() < until:
        below = descendants(guard) if guard is not None else set()
        found = (below | marked(mark)) - {own, guard}
        if not found:
            break
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
    if guard is not None:  # the last, as the orphans are its children for as long as it lives
        with contextlib.suppress(ProcessLookupError):
            os.kill(guard, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _watch(fork_server: int, trainer: int) -> int | None:
    """Wait for the fork server's end and return its wait status; None when the pool or trainer ends first."""
    awake = wake_on_child()
    poll = select.poll()
    poll.register(0, 0)  # only "hung up" is reported: the jobs are the fork server's to read
    poll.register(awake, select.POLLIN)
    while True:
        status = reap(fork_server)
        if status is not None:
            return status
        events = dict(poll.poll(_ORPHAN_CHECK_MS))
        if 0 in events or os.getppid() != trainer:
            return None
        if awake in events:
            os.read(awake, 4096)
