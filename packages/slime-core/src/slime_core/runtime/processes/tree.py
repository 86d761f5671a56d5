"""The processes below another, or with its mark, from /proc. Imports the standard library alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def children_of(parent: int) -> list[int]:
    """Return the children of a process, whichever of its threads started them; none where there is no /proc."""
    found = []
    try:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                found += [int(child) for child in (thread / "children").read_text().split()]
        return found
    except OSError:  # the process has ended, or the kernel was built without that file
        pass
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(_after_name(stat)[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def descendants(parent: int) -> set[int]:
    """Return the living processes below one."""
    children = children_of(parent)
    return {child for child in children if not has_ended(child)}.union(*map(descendants, children))


def marked(mark: str) -> set[int]:
    """Return the living processes that were started with `NAME=value` in their environment, whoever their parents are by now.

    One look at every process of the machine: about 1 ms for 100 of them. Those of other users, and those that were given another
    environment, are not found.
    """
    wanted, found = mark.encode(), set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
                if wanted in environment.read().split(b"\0"):
                    found.add(int(name))
    return found


def has_ended(process: int) -> bool:
    """Say whether a process is gone, or is only waited for by its parent: its files are closed by then."""
    with contextlib.suppress(OSError):
        return _after_name(Path(f"/proc/{process}/stat"))[0] in ("Z", "X")
    return True


def _after_name(stat: Path) -> list[str]:
    """Return the fields that follow a process's name, which may have blanks: its state, its parent, and so on."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()
