"""`FolderLock`: lets one process at a time write to a folder."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import IO

from slime_core.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

#: Name of the lock file; it holds process id and host of the owner.
LOCK = ".lock"


class FolderLock:
    """An exclusive lock on a folder (`flock`), held until it is released or the process ends, even if it is killed."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, folder: Path) -> None:
        """Lock an existing folder.

        Raises:
            ConfigError: another process holds the lock (the message names it), or the lock file cannot be written.
        """
        try:
            file = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
        except OSError as error:
            found, wanted = error.strerror or str(error), "a file in a folder that this process may write to"
            raise ConfigError(
                [Problem(str(folder / LOCK), found, wanted, "give another --run-name")]
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                found = f"{folder}, which {file.read(200) or 'another process'} is writing to"
            todo = "wait until it has ended, or give another --run-name"
            raise ConfigError([Problem("run.run_name", found, "a folder for itself", todo)]) from None
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s): start no other process on it", folder, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
