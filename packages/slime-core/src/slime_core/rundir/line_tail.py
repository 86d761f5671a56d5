"""`LineTail`: the lines that are added to a file which another process writes, perhaps on another machine."""

from __future__ import annotations

import os
from pathlib import Path

from slime_core.files.strict_read import open_regular


class LineTail:
    """Reads a file that grows, each line once. It keeps no file open: one that is replaced or removed meanwhile is noticed.

    Args:
        path: the file, which may not be there yet.
        most_bytes: of what is new, no more than this is read: lines before are passed over, so that neither the begin of a
            large file nor a writer that is faster than the reader takes long.
    """

    def __init__(self, path: Path, *, most_bytes: int) -> None:
        self._path, self._most = path, most_bytes
        self._offset, self._inode = 0, 0
        self.changed_at: float | None = None
        """When the file was written to for the last time, by the clock of its file system; None where there is none."""
        self.passed_over = False
        """Whether lines were passed over since the file began."""

    def read(self) -> tuple[bool, list[bytes]]:
        """Return what is new: whether the file began anew (replaced, shortened or removed), and its complete lines.

        A last line without a line feed is left for the time when the rest is there. A file that cannot be read is none.
        """
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                began_anew = found.st_ino != self._inode or found.st_size < self._offset
                if began_anew:
                    self._inode, self._offset, self.passed_over = found.st_ino, 0, False
                self.changed_at = found.st_mtime
                return began_anew, self._lines(file.fileno(), found.st_size)
        except OSError:
            had_one, self._inode, self._offset, self.changed_at = self._inode != 0, 0, 0, None
            return had_one, []

    def _lines(self, descriptor: int, size: int) -> list[bytes]:
        skips = size - self._offset > self._most
        if skips:
            self._offset, self.passed_over = size - self._most, True
        new = os.pread(descriptor, size - self._offset, self._offset)
        end = new.rfind(b"\n") + 1
        self._offset += end
        lines = new[:end].splitlines()
        return lines[1:] if skips else lines  # of the first the begin is missing
