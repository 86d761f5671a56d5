"""`JsonlRows`: the rows of a JSON Lines file, found by where they begin and read when they are asked for."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slime_core.data.rows.record import Record
from slime_core.errors import DataError
from slime_core.files.json_text import parse_json

#: Bytes of a file that are looked at together.
_CHUNK = 1 << 20
_NEWLINE, _SPACE = ord("\n"), ord(" ")


class JsonlRows:
    """Rows of a `.jsonl`; satisfies `open_rows.Rows`. Of each row 16 bytes are held: where it begins, and its line.

    Args:
        path: the file.
        rows: which of its rows; blank lines are none. Of a slice from the front nothing beyond its end is looked at.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, rows: slice) -> None:
        self._path = path
        is_from_front = (rows.start or 0) >= 0 and (rows.stop or 0) >= 0
        begins, numbers = _lines(path, rows.stop if is_from_front else None)
        self._begins, self._numbers = begins[rows], numbers[rows]
        self._identity = _identity(path.stat())

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._begins)

    def place(self, number: int) -> str:
        """Return file and line, which counts from 1."""
        return f"{self._path}:{self._numbers[number]}"

    def __getitem__(self, number: int) -> Record:
        """Read a row.

        Raises:
            DataError: it is no JSON object, or the file cannot be read any more or has changed; names file and line.
        """
        where = self.place(number)
        try:
            with self._path.open("rb") as file:
                is_same = _identity(os.fstat(file.fileno())) == self._identity
                file.seek(int(self._begins[number]))
                line = file.readline()
        except OSError as error:
            raise DataError(f"{where}: found {error.strerror or error}; wanted a readable file") from error
        if not is_same:
            raise DataError(
                f"{where}: found a file that has changed since it was opened; wanted the same to the end"
            )
        return _parse(self._path, where, line)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes from the first row to the last."""
        digest = hashlib.sha256()
        if not len(self):
            return digest.hexdigest()
        with self._path.open("rb") as file:
            file.seek(int(self._begins[-1]))
            left = int(self._begins[-1]) + len(file.readline()) - int(self._begins[0])
            file.seek(int(self._begins[0]))
            while left and (chunk := file.read(min(left, _CHUNK))):
                digest.update(chunk)
                left -= len(chunk)
        return digest.hexdigest()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _lines(path: Path, most: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the lines of a file begin that are not blank, and their numbers, from 1; the first `most` at least."""
    begins: list[NDArray[np.int64]] = []
    doubtful: list[NDArray[np.bool_]] = []
    at, found, is_begin = 0, 0, True
    with path.open("rb") as file:
        while (most is None or found < most) and (chunk := file.read(_CHUNK)):
            data = np.frombuffer(chunk, dtype=np.uint8)
            local = np.flatnonzero(data == _NEWLINE) + 1
            ends_line = len(local) > 0 and local[-1] == len(data)
            local = np.concatenate([np.zeros(int(is_begin), dtype=np.int64), local[: len(local) - ends_line]])
            doubt = data[local] <= _SPACE  # white space, if it is text
            begins.append(local + at)
            doubtful.append(doubt)
            found += len(local) - int(doubt.sum())
            at, is_begin = at + len(data), bool(ends_line)
    if not begins:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    whole, is_row = np.concatenate(begins), ~np.concatenate(doubtful)
    with path.open("rb") as file:
        for number in np.flatnonzero(~is_row):
            file.seek(int(whole[number]))
            is_row[number] = bool(file.readline().strip())
    return whole[is_row], np.flatnonzero(is_row) + 1


def _parse(path: Path, where: str, line: bytes) -> Record:
    try:
        values = parse_json(line.decode("utf-8-sig"))  # tolerates the byte-order mark that some editors write
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: found bytes that are not UTF-8 (at {error.start}); wanted JSON") from error
    except ValueError as error:
        begin = line[:60].decode(errors="replace").strip()
        raise DataError(
            f"{where}: found {begin!r}, which is not JSON ({error}); wanted one JSON object a line"
        ) from error
    if not isinstance(values, dict):
        raise DataError(f"{where}: found a JSON {type(values).__name__}; wanted one JSON object a line")
    return Record(where, values, path.parent)
