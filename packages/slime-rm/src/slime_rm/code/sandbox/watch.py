"""Counting the memory of all processes of a program together, which no resource limit does. Standard library only.

It needs no control group, which an ordinary user and most containers may not make. What it cannot see is forbidden
(`filter`): memory that belongs to no process (`memfd_create`, System V segments) or that a process can hide (shared
mappings without a file, pages given to a pipe, larger buffers). A GPU's driver needs shared mappings: a program that calls it
can have memory in them that is counted only while it is in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

#: How fast a program can fill memory, in bytes a second: the next look comes before it can have used up what is left.
_FASTEST = 1 << 33
_SOONEST_S, _LATEST_S = 0.001, 0.05
#: What the kernel holds at most for a descriptor, a full pipe, and for a socket; larger ones cannot be asked for.
_PIPE_BYTES, _SOCKET_BYTES = 1 << 16, 1 << 19
_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_VM = 1


def go_first() -> None:
    """Give this process a core as soon as it wants one, where it may ask for that; processes that it starts have no such right.

    Root may in most places, an ordinary user may not. Without it a busy machine can keep a process that slept, and had counted
    for some milliseconds before, waiting for 300 ms, in which a program can fill far more than it has left.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def watch(first: int, limit: int, box: str) -> bool:
    """Wait for the end of `first`, process 1 of a program; kill it when its program uses more than `limit` bytes.

    The working folder is to be `/proc`, as seen from outside of the program's namespaces.

    Args:
        first: its id. It counts as nothing itself, but all of its descendants do.
        limit: bytes of all processes: pages (those that several share count once), page tables, full pipes and
            sockets, and files in `box`.
        box: the folder that the program may write to, which is in memory.

    Returns:
        Whether it was killed for its memory.
    """
    end = os.pidfd_open(first)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    used, killed = 0, False
    while not killed and not poll.poll(1000 * min(max((limit - used) / _FASTEST, _SOONEST_S), _LATEST_S)):
        used = _at_most(first, box)
        if used > limit:
            begin = time.monotonic()
            with _stopped(first) as processes:
                used = _outside(first, processes, box) + _shared_once(processes)
                killed = used > limit
                if killed:  # before they run again; process 1 ends what else there is, when it gets to run
                    _signal([*processes, first], signal.SIGKILL)
                else:  # who goes first leaves the core to others for as long as it had it
                    time.sleep(time.monotonic() - begin)
    os.waitpid(first, 0)
    os.close(end)
    return killed


def _at_most(first: int, box: str) -> int:
    """Return the bytes in use, or more: pages that several processes share count for each. Cheap to know."""
    processes = _below(first)
    return _outside(first, processes, box) + sum(map(_pages, processes))


def _outside(first: int, processes: list[int], box: str) -> int:
    """Return the bytes that are in use besides pages of processes."""
    return _files(box) + _SOCKET_BYTES * _sockets(first) + sum(map(_pipes, processes)) if processes else 0


def _below(parent: int) -> list[int]:
    """Return all descendants of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in os.listdir(f"{parent}/task"):
            for child in Path(f"{parent}/task/{thread}/children").read_text().split():
                found += [int(child), *_below(int(child))]
    return found


def _pages(process: int) -> int:
    """Return the bytes of a process, with what it shares with others: resident, swapped out, and page tables."""
    return sum(_fields(process, "status", (b"VmRSS", b"VmSwap", b"VmPTE")))


@contextlib.contextmanager
def _stopped(first: int) -> Iterator[list[int]]:
    """Stop all descendants of `first`, and let them run again at the end."""
    stopped: list[int] = []
    try:
        while fresh := [process for process in _below(first) if process not in stopped]:
            _signal(fresh, signal.SIGSTOP)
            stopped += fresh
        yield stopped
    finally:
        _signal(stopped, signal.SIGCONT)


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _shared_once(processes: list[int]) -> int:
    """Return the bytes of processes that stand still: this takes longer the more they use."""
    return sum(
        sum(_fields(process, "smaps_rollup", (b"Pss", b"SwapPss")))
        + sum(_fields(process, "status", (b"VmPTE",)))
        for process in _address_spaces(processes)
    )


def _address_spaces(processes: list[int]) -> Iterator[int]:
    """Yield one process for each address space: a child that `vfork` made has its parent's."""
    libc, call = ctypes.CDLL(None), _KCMP[platform.machine()]
    seen: list[int] = []
    for process in processes:
        alive = (thread for thread in _threads(process) if _lines(thread, "status", (b"VmRSS",)))
        thread = next(alive, process)
        if all(libc.syscall(call, thread, other, _KCMP_VM, 0, 0) != 0 for other in seen):
            seen.append(thread)
            yield process


def _fields(process: int, file: str, names: tuple[bytes, ...]) -> list[int]:
    """Return the bytes that some lines of a file about a process tell; nothing when it has ended."""
    return next(filter(None, (_lines(thread, file, names) for thread in _threads(process))), [])


def _lines(thread: int, file: str, names: tuple[bytes, ...]) -> list[int]:
    with contextlib.suppress(OSError):
        lines = [line.partition(b":") for line in Path(f"{thread}/{file}").read_bytes().splitlines()]
        return [int(value.split()[0]) << 10 for name, _, value in lines if name in names]
    return []


def _threads(process: int) -> Iterator[int]:
    """Yield the first thread, then the others: where the first has ended, only they tell of the memory."""
    yield process
    with contextlib.suppress(OSError):
        yield from map(int, os.listdir(f"{process}/task"))


def _pipes(process: int) -> int:
    with contextlib.suppress(OSError):
        return _PIPE_BYTES * len(os.listdir(f"{process}/fd"))
    return 0


def _sockets(first: int) -> int:
    """Return the number of sockets in the namespace of `first`, those in flight between processes included."""
    with contextlib.suppress(OSError):
        return int(Path(f"{first}/net/sockstat").read_text().split()[2])
    return 0


def _files(box: str) -> int:
    with contextlib.suppress(OSError):
        space = os.statvfs(box)
        return (space.f_blocks - space.f_bfree) * space.f_frsize
    return 0
