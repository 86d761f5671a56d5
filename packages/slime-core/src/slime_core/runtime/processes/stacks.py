"""Stacks of another process of the run: it writes them to its log when it is sent a signal, whatever it is doing."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sysconfig
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO

_SIGNAL = signal.SIGUSR1
#: Seconds that a process gets to write its stacks; one that is stopped writes none.
_WRITTEN_S = 1.0
_POLL_S = 0.02
#: Bytes of them that are read.
_MOST_BYTES = 65536
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)


def write_stacks_when_asked(log: IO[str] | int) -> None:
    """Have this process write the stacks of its threads to a file or descriptor when `ask_for_stacks` asks, also from within native code."""
    faulthandler.register(_SIGNAL, file=log, all_threads=True)


def ask_for_stacks(pid: int, log: Path, *, without: Collection[str] = ()) -> list[str]:
    """Have a process of this machine write its stacks to its log; waits up to a second for them.

    Args:
        pid: its id; it has called `write_stacks_when_asked`, else it is ended.
        log: where it writes.
        without: parts of paths of files that do not count as its own, such as `/ray/`.

    Returns:
        For each of its threads `FILE:LINE in NAME`, the innermost line that is not the standard library's; nothing for
        threads without one, and where no stacks were written.
    """
    with contextlib.suppress(OSError):
        size = before = log.stat().st_size
        os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + _WRITTEN_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            last, size = size, log.stat().st_size
            if size == last > before:  # it has written all
                break
        with log.open("rb") as file:
            file.seek(before)
            return _own_lines(file.read(_MOST_BYTES).decode(errors="replace"), without)
    return []


def _own_lines(told: str, without: Collection[str]) -> list[str]:
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
