"""`OwnFolder`: a folder in shared memory, which would outlive a process that is killed."""

from __future__ import annotations

import fcntl
import secrets
import shutil
from pathlib import Path
from typing import IO

#: File that the owner of a folder keeps locked.
_LOCK = ".lock"


class OwnFolder:
    """A folder of this process alone. One whose process was killed goes when the next one is made beside it.

    Args:
        parent: made if it is missing.
        prefix: of its name, and of those that go.
    """

    def __init__(self, parent: Path, *, prefix: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent, prefix)
        name = f"{prefix}{secrets.token_hex(8)}"
        new = parent / f".{name}"
        new.mkdir()
        self._lock = _locked(new)
        self.path = new.rename(parent / name)  # before that nobody looks at it

    def remove(self) -> None:
        """Delete it, with all that is in it. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


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
