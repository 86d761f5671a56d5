"""A process beside the driver that kills what of Ray would outlive it, and says why the driver is gone if it could not.

When a driver is killed, the cluster that it started goes with it: the kernel kills the processes that it is the parent of.
Those below them end by themselves, but not at once: the agents of Ray 2.60 first report for a minute to a head that is gone,
and a rank that is stopped ends when it is continued. And when the raylet of its machine ends, Ray ends the driver on the spot,
with status 1 and without a word.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

#: Seconds that it gets to kill them.
_GONE_S = 5.0
#: Seconds between two looks at what Ray starts, until the ranks are there.
_LOOK_S = 0.1
#: Seconds after the driver's end in which what it was just starting is looked for.
_LATE_S = 2.0
#: In the place of a process id: the driver goes on, or ends by itself.
_CLOSES = 0
#: What it says where the raylet was seen to end before the driver, and where the driver is gone and it may have been so.
_RAYLET_ENDED = (
    "Ray's raylet on this machine ended: it was killed, or ran out of memory; Ray ended the run with it"
)
_UNTOLD = (
    "the process of the run ended without a word: it was killed, or Ray ended it, as its raylet had ended"
)
#: Environment variable that names the driver to all that Ray starts for it.
_MARK = "SLIME_RAY_DRIVER"


class Guard:
    """Kills the processes that it has hold of when this process ends, however it does, or calls `close`.

    It is a process of its own; where somebody kills it, another takes its place.

    Args:
        starts_ray: whether this process is about to start Ray: until the guard is told of ranks, it looks for what the raylet
            starts.
        is_ending: says whether this process kills all that it has started, the guard too, and ends.
    """

    def __init__(self, *, starts_ray: bool, is_ending: Callable[[], bool] = lambda: False) -> None:
        mark = f"{os.getpid()}-{os.getpgrp()}-{secrets.token_hex(8)}"
        if starts_ray:
            os.environ[_MARK] = mark
        self._command = [sys.executable, "-I", "-S", __file__, *([mark] if starts_ray else [])]
        self._is_ending = is_ending
        self._watched, self._lock, self._closed = dict[int, int](), threading.Lock(), False
        self._process = self._start()
        threading.Thread(target=self._replace, name="guard", daemon=True).start()

    def watch(self, pids: Iterable[int]) -> None:
        """Tell it of ranks on this machine."""
        with self._lock:
            if not self._closed:
                _hold(self._watched, pids)
                self._tell(pids)

    def close(self) -> None:
        """Have it kill them, and wait until it has. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tell([_CLOSES])
        self._input.close()
        try:
            self._process.wait(_GONE_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._process.kill()
            self._process.wait()
        for process in self._watched.values():
            os.close(process)

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal are the driver's
        )

    def _tell(self, pids: Iterable[int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed it
            self._input.write("".join(f"{pid}\n" for pid in pids).encode())

    def _replace(self) -> None:
        """Start another whenever it is killed, and tell that one of the ranks that run; one that fails by itself would again."""
        while self._process.wait() < 0:
            with self._lock:
                if self._closed or self._is_ending():
                    return
                self._input.close()
                self._process = self._start()
                ended = _ready(self._watched.values(), 0)
                self._tell(pid for pid, process in self._watched.items() if process not in ended)


def main(mark: str | None) -> None:
    """Read process ids from standard input, a line each, and kill them at its end.

    Args:
        mark: of the driver that starts Ray, which begins with the numbers of its process and process group; None where Ray
            was there before.
    """
    held, is_told = dict[int, int](), mark is None
    parent, group = (os.getppid(), 0) if mark is None else map(int, mark.split("-")[:2])
    raylets, driver, was_first = dict[int, int](), dict[int, int](), False
    _hold(driver, [parent])
    while True:
        ready = _ready([0, *raylets.values()], None if is_told else _LOOK_S)
        if not is_told:
            _hold(raylets, filter(_is_raylet, _children(parent)))
            _hold(held, _below_raylets(parent))
        if any(ended in ready for ended in raylets.values()):
            # Its own end shows before that of its children, which follows from it.
            was_first = bool(driver) and not _ready(driver.values(), 0)
            for ended in raylets.values():
                os.close(ended)
            raylets, is_told = {}, True
        if 0 in ready:
            told = [int(line) for line in os.read(0, 1 << 16).split()]
            _hold(held, [pid for pid in told if pid != _CLOSES])
            is_told = True
            if not told or _CLOSES in told:
                break
    _kill(held)
    if not told:
        _say(_RAYLET_ENDED if was_first else _UNTOLD)
    until = time.monotonic() + _LATE_S
    while mark is not None and not told and time.monotonic() < until:  # the driver was killed
        _hold(held, _orphans(mark, group))
        _kill(held)
        time.sleep(_LOOK_S)


def _ready(descriptors: Iterable[int], patience: float | None) -> set[int]:
    """The descriptors of any number that can be read, after `patience` seconds at most; None waits for one."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if patience is None else patience * 1000)}


def _say(what: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is closed
        os.write(2, f"slime: {what}; the same command goes on from the newest checkpoint\n".encode())


def _kill(held: dict[int, int]) -> None:
    for process in held.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)


def _hold(held: dict[int, int], pids: Iterable[int]) -> None:
    """Keep hold of processes: another one that has the number later is safe."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if pid not in held:
                held[pid] = os.pidfd_open(pid)


def _below_raylets(driver: int) -> Iterator[int]:
    for child in _children(driver):
        if _is_raylet(child):
            yield from _children(child)


def _orphans(mark: str, group: int) -> Iterator[int]:
    """Yield what Ray started for the driver and what has no raylet any more: an agent may have been too young to be seen below it.

    It has the driver's mark until it gives itself a title, which overwrites its environment, and is in the driver's process group.
    """
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command, is_in_group = (folder / "cmdline").read_bytes(), os.getpgid(int(folder.name)) == group
            is_titled = command.startswith(b"ray::")
            is_marked = wanted in (folder / "environ").read_bytes().split(b"\0")
            is_ours = is_marked if b"/ray/" in command else is_titled and (is_in_group or is_marked)
            if is_ours and not _is_raylet(_parent(folder)):
                yield int(folder.name)


def _parent(folder: Path) -> int:
    return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def _is_raylet(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() == "raylet"
    except OSError:
        return False


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # the process has ended, or does just now
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has
                yield from map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
