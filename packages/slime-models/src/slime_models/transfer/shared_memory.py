"""`LockedFolder`: a folder in shared memory that is removed even if its process is killed."""

from __future__ import annotations

import fcntl
import secrets
import shutil
import weakref
from pathlib import Path
from typing import IO

from slime_core.runtime.processes.at_exit import AtExit

#: File that the owner of a folder keeps locked.
_LOCK = ".lock"


class LockedFolder:
    """A folder of this process alone, which goes with it, even if it is killed. Other users cannot look into it.

    A process of its own sees to that. Where that was killed too, the folder goes when the next one is made beside it.

    Args:
        parent: made if it is missing.
        prefix: of its name, and of those that are removed.
    """

    def __init__(self, parent: Path, *, prefix: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent, prefix)
        name = f"{prefix}{secrets.token_hex(8)}"
        new = parent / f".{name}"
        new.mkdir(mode=0o700)
        self._lock = _locked(new)
        self.path = new.rename(parent / name)  # under its old name no sweep looks at it
        remover = AtExit('exec rm -rf -- "$0"', str(self.path.absolute()))
        self._remove = weakref.finalize(self, _remove, self.path, remover, self._lock)

    def remove(self) -> None:
        """Delete it, with all that is in it. May be called twice."""
        self._remove()


def _remove(path: Path, remover: AtExit, lock: IO[bytes] | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        lock.close()
    remover.cancel()


def _sweep(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*/{_LOCK}"):
        if (lock := _locked(folder.parent)) is not None:
            with lock:
                shutil.rmtree(folder.parent, ignore_errors=True)


def _locked(folder: Path) -> IO[bytes] | None:
    """Return the locked file of a folder; None where another process has it, or the file system has no locks."""
    try:
        file = (folder / _LOCK).open("ab")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
