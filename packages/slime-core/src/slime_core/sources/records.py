"""Reading the rows of a data file, each with the place that messages name it by."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import DataError

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
    path, rows = parse_spec(spec)
    if path.suffix not in _READERS:
        raise DataError(f"{path}: found a {path.suffix or 'nameless'} file; wanted {' or '.join(_READERS)}")
    if not path.is_file():
        raise DataError(f"{path}: found {'a folder' if path.is_dir() else 'nothing'}; wanted a data file")
    records = _READERS[path.suffix](path, rows)
    if not records:
        empty = rows == slice(None, None)
        raise DataError(f"{spec}: found {'an empty file' if empty else 'no row in the slice'}; wanted rows")
    return records


def parse_spec(spec: str) -> tuple[Path, slice]:
    """Split `path@[start:stop]` into the file and the slice of its rows.

    Raises:
        DataError: the slice is malformed.
    """
    match = _SLICED.fullmatch(spec)
    if match is not None:
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        return Path(match["path"]), slice(start, stop)
    if "@[" in spec:
        raise DataError(f"{spec}: found a malformed slice; wanted path@[start:stop], as in data.jsonl@[:100]")
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
        values = json.loads(line.decode("utf-8-sig"))  # tolerates the byte-order mark that some editors write
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: found bytes that are not UTF-8 (at {error.start}); wanted JSON") from error
    except json.JSONDecodeError as error:
        shown = line[:60].decode(errors="replace").strip()
        raise DataError(
            f"{where}: found {shown!r}, which is not JSON ({error.msg} at column {error.colno}); "
            "wanted one JSON object a line"
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
            return [Record(f"{path}:row {number}", values, path.parent) for number, values in numbered]
    except (invalid, OSError) as error:
        raise DataError(f"{path}: found a broken Parquet file ({error}); wanted a readable one") from error


_READERS: dict[str, Callable[[Path, slice], list[Record]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
