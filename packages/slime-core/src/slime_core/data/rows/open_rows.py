"""Data files by their names: which rows of which file a setting means, and reading them one at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slime_core.data.rows.hugging_face import PREFIX, dataset_problem, open_dataset
from slime_core.data.rows.jsonl import JsonlRows
from slime_core.data.rows.parquet import open_parquet
from slime_core.data.rows.record import Record
from slime_core.errors import DataError, Problem
from slime_core.files.json_text import why_not_text

_SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>(?:-?\d+)?):(?P<stop>(?:-?\d+)?)\]")


class Rows(Protocol):
    """Rows of a data set, each read when it is asked for."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def place(self, number: int) -> str:
        """Return where a row stands, for messages: `train.jsonl:17`."""

    def __getitem__(self, number: int) -> Record:
        """Read a row; raises DataError, which names it, where it is broken."""

    @property
    def digest(self) -> str:
        """A hash of what the rows are, to recognise them when a run is resumed."""


def open_rows(spec: str) -> Rows:
    """Return the rows of `path` or `path@[start:stop]`; blank lines are no rows.

    Either bound may be left out, and negative ones count from the end. Nothing is held in memory but where rows begin.

    Raises:
        DataError: the file is missing, of another kind, or empty; or the slice has no row.
    """
    if problem := file_problem(spec):
        raise DataError(str(problem))
    path, rows = parse_spec(spec)
    try:
        found = (
            open_dataset(str(path), rows) if spec.startswith(PREFIX) else _READERS[path.suffix](path, rows)
        )
    except OSError as error:
        raise DataError(f"{path}: found {error.strerror or error}; wanted a readable file") from error
    if not len(found):
        empty = rows == slice(None, None)
        raise DataError(f"{spec}: found {'an empty file' if empty else 'no row in the slice'}; wanted rows")
    return found


def read_rows(spec: str, *, most: int | None = None) -> list[Record]:
    """Read rows, the first `most`, all at once; see `open_rows`."""
    rows = open_rows(spec)
    return [rows[number] for number in range(len(rows) if most is None else min(most, len(rows)))]


def file_problem(spec: str) -> Problem | None:
    """Return what is wrong with `path` or `path@[start:stop]` before it is read; None where nothing is."""
    try:
        path, _ = parse_spec(spec)
    except DataError as error:
        where, _, wanted = str(error).partition(": found a malformed slice; wanted ")
        return Problem(where, "a malformed slice", wanted)
    if spec.startswith(PREFIX):
        return dataset_problem(str(path))
    if path.suffix not in _READERS:
        return Problem(
            shown_path(path),
            f"a {path.suffix or 'nameless'} file",
            f"{' or '.join(_READERS)}, or {PREFIX}NAME",
        )
    if not os.path.isfile(path):
        found = "a folder" if os.path.isdir(path) else "nothing"
        return Problem(shown_path(path), found, "a data file")
    return None


def names_file(text: str) -> bool:
    """Return whether text is written as data files are named, or is the path of any file that is there."""
    is_file = not why_not_text(text) and os.path.isfile(text)
    return is_file or text.startswith(PREFIX) or Path(text.partition("@[")[0]).suffix in _READERS


def shown_path(path: Path) -> str:
    """Return a path as messages show it: of one that is longer than any may be, the beginning."""
    text = str(path)
    return text if len(text) <= 300 else f"{text[:300]}..."


def parse_spec(spec: str) -> tuple[Path, slice]:
    """Split `path@[start:stop]` into the file and the slice of its rows.

    Raises:
        DataError: the slice is malformed.
    """
    match = _SLICED.fullmatch(spec)
    if match is not None:
        start, stop = (int(match[name][:18]) if match[name] else None for name in ("start", "stop"))
        return Path(match["path"]), slice(start, stop)
    if "@[" in spec:
        raise DataError(
            f"{spec[:300]}: found a malformed slice; wanted path@[start:stop], as in data.jsonl@[:100]"
        )
    return Path(spec), slice(None, None)


_READERS: dict[str, Callable[[Path, slice], Rows]] = {
    ".jsonl": JsonlRows,
    ".parquet": open_parquet,
}
