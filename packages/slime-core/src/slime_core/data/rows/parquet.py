"""Rows of a Parquet file, and of any table of Arrow that is mapped from the disk."""

from __future__ import annotations

import functools
import hashlib
import importlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from slime_core.data.rows.record import Record
from slime_core.errors import DataError
from slime_core.files.json_text import MAX_DEPTH, is_deep


class ParquetRows:
    """Rows of a `.parquet`; satisfies `open_rows.Rows`. The system's page cache holds what was read, this process none of it.

    Args:
        path: the file.
        table: its rows, as an Arrow table that is mapped from the disk.
        begin: number of the first of them in the file.
    """

    def __init__(self, path: Path, table: Any, begin: int) -> None:
        self._path, self._table, self._begin = path, table, begin

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._table.num_rows)

    def place(self, number: int) -> str:
        """Return file and row, which counts from 1."""
        return f"{self._path}:row {self._begin + number + 1}"

    def __getitem__(self, number: int) -> Record:
        """Read a row.

        Raises:
            DataError: it holds what a row of JSON may not hold; names it.
        """
        (values,) = self._table.slice(number, 1).to_pylist()
        return checked(Record(self.place(number), values, self._path.parent))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the file, and which rows of it these are."""
        with self._path.open("rb") as file:
            whole = hashlib.file_digest(file, "sha256")
        return f"{whole.hexdigest()}:{self._begin}:{len(self)}"


def open_parquet(path: Path, rows: slice) -> ParquetRows:
    """Return the rows of a Parquet file.

    Rows of Parquet cannot be read one by one. Those that are wanted are written once, batch by batch, to an uncompressed
    temporary file, which is mapped and has no name from the first: its space is free again when the process ends.

    Raises:
        DataError: pyarrow is missing, the file is broken, or the temporary folder has no room for its rows.
    """
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow; install slime-core[parquet]") from error
    with tempfile.TemporaryFile(prefix="slime-", suffix=".arrow") as copy:
        try:
            with parquet.ParquetFile(path) as file:
                if twice := _twice(arrow, file.schema_arrow):
                    raise DataError(f"{path}: found the column {twice!r} twice; wanted each name once")
                begin, end, _ = rows.indices(file.metadata.num_rows)
                batches = _between(file.iter_batches(), begin, end)
                _write(copy, arrow.ipc.new_stream(copy, file.schema_arrow), batches, path)
            table = arrow.ipc.open_stream(arrow.memory_map(f"/dev/fd/{copy.fileno()}")).read_all()
        except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}: found a broken Parquet file ({error}); wanted a readable one"
            ) from error
    return ParquetRows(path, table, begin)


def _twice(arrow: Any, fields: Iterable[Any]) -> str | None:
    """Return a name that two of these fields of Arrow have, or two of the fields of one of them; None where none has."""
    fields = list(fields)
    names = [field.name for field in fields]
    for field in fields:
        if names.count(field.name) > 1:
            return str(field.name)
        kind, is_of = field.type, arrow.types
        inner = list(kind) if is_of.is_struct(kind) else []
        inner = [kind.value_field] if is_of.is_list(kind) or is_of.is_large_list(kind) else inner
        inner = [kind.item_field] if is_of.is_map(kind) else inner
        if (found := _twice(arrow, inner)) is not None:
            return f"{field.name}.{found}"
    return None


def _between(batches: Iterable[Any], begin: int, end: int) -> Iterator[Any]:
    """Yield the rows from `begin` to before `end` of Arrow record batches, as batches; reads none beyond them."""
    at = 0
    for batch in batches:
        if at >= end:
            return
        first, last = max(begin - at, 0), min(end - at, batch.num_rows)
        at += batch.num_rows
        if first < last:
            yield batch.slice(first, last - first)


def _write(copy: IO[bytes], stream: Any, batches: Iterator[Any], path: Path) -> None:
    """Write batches to the temporary file; an error of its disk is told as such, one of reading is left as it is."""
    while (batch := next(batches, None)) is not None:
        try:
            stream.write_batch(batch)
        except OSError as error:
            raise _no_room(path, error) from error
    try:
        stream.close()
        copy.flush()
    except OSError as error:
        raise _no_room(path, error) from error


def _no_room(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{tempfile.gettempdir()}: found {error.strerror or error} while the rows of {path} were written to a temporary file; "
        "wanted room for them uncompressed; free some, or set TMPDIR to a folder of another disk"
    )


def checked(record: Record) -> Record:
    """Return a row that holds what a row of JSON may hold.

    Raises:
        DataError: it is nested too deep; names it.
    """
    for key, value in record.values.items():
        if isinstance(value, dict | list) and is_deep(value):
            raise DataError(
                f"{record.where}: found lists or tables nested deeper than {MAX_DEPTH} in {key!r}; wanted fewer"
            )
    return record
