"""Reading the rows of a data file, each with the place that messages name it by."""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import DataError, Problem
from slime_core.json_text import MAX_DEPTH, is_deep, parse_json

_SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>(?:-?\d+)?):(?P<stop>(?:-?\d+)?)\]")


@dataclass(frozen=True)
class Record:
    """One row."""

    where: str
    """File and line (JSONL) or row (Parquet), both from 1: `train.jsonl:17`."""
    values: dict[str, Any]
    """Column -> value."""
    folder: Path = Path()
    """The file's: paths in it begin there and stay there, unless the settings name another one."""

    def value(self, key: str, *, setting: str) -> Any:
        """Return the value of column `key`, which `setting` asks for.

        Raises:
            DataError: there is no such column; names the row and the columns that it has.
        """
        if key not in self.values:
            raise DataError(
                f"{self.where}: found the columns {sorted(self.values)}; wanted {key!r} ({setting}); "
                f"set {setting} to one of them"
            )
        return self.values[key]


def read_records(spec: str) -> list[Record]:
    """Read the rows of `path` or `path@[start:stop]`; blank lines are no rows.

    Either bound may be left out, and negative ones count from the end. A file
    that is read up to `stop` is not looked at beyond it.

    Raises:
        DataError: the file is missing, of another kind, empty, or broken; or the slice has no row.
    """
    if problem := file_problem(spec):
        raise DataError(str(problem))
    path, rows = parse_spec(spec)
    try:
        records = _READERS[path.suffix](path, rows)
    except OSError as error:
        raise DataError(f"{path}: found {error.strerror or error}; wanted a readable file") from error
    if not records:
        empty = rows == slice(None, None)
        raise DataError(f"{spec}: found {'an empty file' if empty else 'no row in the slice'}; wanted rows")
    return records


def file_problem(spec: str) -> Problem | None:
    """Return what is wrong with `path` or `path@[start:stop]` before it is read; None where nothing is."""
    try:
        path, _ = parse_spec(spec)
    except DataError as error:
        where, _, wanted = str(error).partition(": found a malformed slice; wanted ")
        return Problem(where, "a malformed slice", wanted)
    if path.suffix not in _READERS:
        return Problem(shown_path(path), f"a {path.suffix or 'nameless'} file", " or ".join(_READERS))
    if not os.path.isfile(path):
        found = "a folder" if os.path.isdir(path) else "nothing"
        return Problem(shown_path(path), found, "a data file")
    return None


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


def _read_jsonl(path: Path, rows: slice) -> list[Record]:
    with path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        return [_parse(path, number, line) for number, line in _sliced(lines, rows)]


def _sliced(lines: Iterator[tuple[int, bytes]], rows: slice) -> Iterator[tuple[int, bytes]]:
    """Slice without reading beyond the last row wanted, where that can be."""
    if (rows.start or 0) < 0 or (rows.stop or 0) < 0:
        return iter(list(lines)[rows])
    return itertools.islice(lines, rows.start, rows.stop)


def _parse(path: Path, number: int, line: bytes) -> Record:
    where = f"{path}:{number}"
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


def _read_parquet(path: Path, rows: slice) -> list[Record]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        invalid = importlib.import_module("pyarrow").ArrowInvalid
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow; install slime-core[parquet]") from error
    try:
        with parquet.ParquetFile(path) as file:
            start, stop, _ = rows.indices(file.metadata.num_rows)
            batches = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
            numbered = itertools.islice(enumerate(batches, start=1), start, max(start, stop))
            return [
                _whole(Record(f"{path}:row {number}", values, path.parent)) for number, values in numbered
            ]
    except (invalid, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: found a broken Parquet file ({error}); wanted a readable one") from error


def _whole(record: Record) -> Record:
    """Return a row that holds what a row of JSON may hold."""
    for key, value in record.values.items():
        if isinstance(value, dict | list) and is_deep(value):
            raise DataError(
                f"{record.where}: found lists or tables nested deeper than {MAX_DEPTH} in {key!r}; wanted fewer"
            )
    return record


_READERS: dict[str, Callable[[Path, slice], list[Record]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
