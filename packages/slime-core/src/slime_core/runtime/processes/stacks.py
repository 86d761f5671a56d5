"""Stacks of another process of the run: it writes them to its log when it is sent a signal, whatever it is doing."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sysconfig
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import IO

_SIGNAL = signal.SIGUSR1
#: Seconds that each process gets to write its stacks; one that is stopped writes none.
_WRITTEN_S = 0.5
_POLL_S = 0.02
#: Bytes of them that are read.
_MOST_BYTES = 65536
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)


def write_stacks_when_asked(log: IO[str] | int) -> None:
    """Have this process write the stacks of its threads to a file or descriptor when `ask_for_stacks` asks, also from within native code."""
    faulthandler.register(_SIGNAL, file=log, all_threads=True)


def ask_for_stacks(pids: Iterable[int], log: Path) -> str:
    """Have processes of this machine write their stacks to their common log, one after the other: lines of two would mix.

    Args:
        pids: their ids; those that have not called `write_stacks_when_asked` are left alone.
        log: where they write.

    Returns:
        What was written meanwhile; empty where nothing was.
    """
    with contextlib.suppress(OSError):
        before = log.stat().st_size
        for pid in filter(_hears, pids):
            size = log.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNAL)
                _wait_for_more(log, size)
        with log.open("rb") as file:
            file.seek(before)
            return file.read(_MOST_BYTES).decode(errors="replace")
    return ""


def _wait_for_more(log: Path, begun: int) -> None:
    """Wait until a file has grown beyond `begun` bytes and grows no more, at most `_WRITTEN_S`."""
    size, deadline = begun, time.monotonic() + _WRITTEN_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        last, size = size, log.stat().st_size
        if size == last > begun:  # it has written all
            return


def _hears(pid: int) -> bool:
    """Say whether a process catches the signal; it would end one that does not."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)
    return False


def own_lines(told: str, without: Collection[str] = ()) -> list[str]:
    """Return where processes were that have told their stacks.

    Args:
        told: what they wrote.
        without: parts of paths of files that do not count as their own, such as `/ray/`.

    Returns:
        For each thread `FILE:LINE in NAME`, the innermost line that is not the standard library's; nothing for threads without
        one.
    """
    standard = (sysconfig.get_path("stdlib") + "/", "<frozen ")
    found = []
    for thread in _THREAD.split(told)[1:]:
        for frame in _FRAME.finditer(thread):
            file = frame["file"]
            is_standard = file.startswith(standard) and "site-packages" not in file  # which may lie below it
            if not is_standard and not any(part in file for part in without):
                found.append(f"{file}:{frame['line']} in {frame['name']}")
                break
    return found
