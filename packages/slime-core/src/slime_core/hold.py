"""`Hold`: a folder for one process at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import IO

from slime_core.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

#: File that is locked; it says who has the folder.
LOCK = ".lock"


class Hold:
    """Keeps a folder to this process, until it is released or the process ends, in whatever way."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, folder: Path) -> None:
        """Take the folder, which exists.

        Raises:
            ConfigError: another one has it, and says who; or it cannot be locked.
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
        """Let go of the folder; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
