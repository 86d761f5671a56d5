"""Records of samples: readable lines in a `.jsonl`, their columns of tokens in a `.npz` beside it, written by a thread.

The line of a sample has every field but the columns that it has; those stand in the archive, each as one flat array
`NAME` and int64 `NAME_offsets` [N + 1]: the sample of line i, from 0, owns NAME[NAME_offsets[i]:NAME_offsets[i + 1]].
`index` int64 [N] is that of each line's sample, -1 where it has none, by which an edited file is found. A column that has no
exact form there stays in its line, as all did in runs of earlier versions. The weights of each token are the spans of
`weight_versions` and `weight_version_starts` in the line; `slime_core.samples.versions` makes a number a token of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import pydantic_core
from numpy.typing import NDArray

from slime_core.errors import ConfigError, Problem
from slime_core.files.json_text import MAX_DEPTH, is_deep
from slime_core.files.strict_read import open_regular
from slime_core.runtime.daemon_thread import DaemonThread
from slime_core.samples import Sample
from slime_core.samples.compact import FLOAT32, FLOAT64, IDS, MASK, concatenated, dtype_of, is_compact, view
from slime_core.samples.reused_memory import ReusedMemory

#: Columns of the archive, and the type that they have there if it holds their numbers.
COLUMNS = {"tokens": IDS, "loss_mask": MASK, "rollout_log_probs": FLOAT32, "teacher_log_probs": FLOAT32}
#: Fields that are not recorded: they may be hundreds of numbers a token.
_LEFT_OUT = ("rollout_routed_experts", "rollout_top_p_token_ids", "rollout_top_p_token_offsets")
_NOTHING = dict.fromkeys(_LEFT_OUT)
_FIELDS = tuple(field.name for field in fields(Sample))
#: Files that may wait for the thread: the samples of a step, and those that it dropped.
_MOST_WAITING = 2

Row = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """What two files of records are to hold; shares no memory with the samples that it was taken of."""

    lines: bytes
    columns: Mapping[str, NDArray[Any]]


def records_of(
    samples: Sequence[Sample], dropped: Sequence[str] = (), *, memory: ReusedMemory | None = None
) -> Records:
    """Take the records of samples as they are now.

    Args:
        samples: of one file.
        dropped: why each was dropped, where they were.
        memory: of the columns; new memory when not given.
    """
    memory = memory or ReusedMemory()
    rows = [_fields_of(sample) for sample in samples]
    columns: dict[str, NDArray[Any]] = {
        "index": np.array(
            [-1 if sample.index is None else sample.index for sample in samples], dtype=np.int64
        )
    }
    for name, typecode in COLUMNS.items():
        columns |= _taken_out(rows, name, typecode, memory)
    for row, reason in zip(rows, dropped, strict=bool(dropped)):
        row["dropped"] = reason
    return Records(b"".join(line for row in rows for line in (_line(row), b"\n")), columns)


def _fields_of(sample: Sample) -> Row:
    values = vars(sample)
    row = values.copy() if tuple(values) == _FIELDS else {name: getattr(sample, name) for name in _FIELDS}
    row.update(_NOTHING)
    row["status"] = str(sample.status)  # which JSON is written of faster than of an enum's member
    return row


def _taken_out(
    rows: Sequence[Row], name: str, typecode: str, memory: ReusedMemory
) -> dict[str, NDArray[Any]]:
    """Take a column out of the rows that have it, and return its two arrays; none where no row has it."""
    parts: list[Any] = []
    lengths = np.zeros(len(rows) + 1, dtype=np.int64)
    for number, row in enumerate(rows, 1):
        if row[name] is None or (part := _exact(row[name], typecode)) is None:
            continue
        del row[name]
        parts.append(part)
        lengths[number] = len(part)
    if not parts:
        return {}
    return {name: _flat(parts, typecode, memory), f"{name}_offsets": np.cumsum(lengths)}


def _exact(values: Any, typecode: str) -> Any:
    """Return a column that the archive can hold; None where it is not one of numbers of that kind."""
    if is_compact(values, typecode):
        return values
    try:
        return view(values, FLOAT64 if typecode == FLOAT32 else typecode)
    except (TypeError, OverflowError, ValueError):
        return None


def _flat(parts: Sequence[Any], typecode: str, memory: ReusedMemory) -> NDArray[Any]:
    """Join columns; of 64 bits where 32 do not hold their numbers."""
    if all(is_compact(part, typecode) for part in parts):
        return concatenated(parts, typecode, memory)
    flat = np.concatenate([np.asarray(part) for part in parts])
    with np.errstate(over="ignore"):
        narrow = flat.astype(dtype_of(typecode))
    is_exact = np.array_equal(narrow, flat, equal_nan=flat.dtype.kind == "f")
    exact: NDArray[Any] = narrow if is_exact else flat
    return exact


def _line(row: Row) -> bytes:
    try:
        return pydantic_core.to_json(row, fallback=_plain, inf_nan_mode="constants")
    except (ValueError, TypeError):  # lone surrogates, bytes that are no text
        return json.dumps(row, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Turn what JSON lacks (numpy arrays and scalars, bytes) into plain values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return repr(value)


class RecordWriter:
    """Writes records one after the other in a thread, each file whole or not at all, the lines last.

    An error of a file is raised by the next `write`, or by `flush`.
    """

    def __init__(self) -> None:
        self._thread: DaemonThread | None = None
        self._waiting: deque[Future[None]] = deque()

    def write(self, path: Path, records: Records) -> None:
        """Have records written to `path` and the archive beside it; waits while two others are not written yet.

        Raises:
            OSError: an earlier file could not be written.
        """
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= _MOST_WAITING):
            self._waiting.popleft().result()
        self._thread = self._thread or DaemonThread("records")
        self._waiting.append(self._thread.submit(_write, path, records))

    def flush(self) -> None:
        """Wait until all is written.

        Raises:
            OSError: a file could not be written; the others were.
        """
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """End the thread when all is written; a later `write` starts another."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


def _write(path: Path, records: Records) -> None:
    with atomic_file(path.with_suffix(".npz")) as file:
        _save(file, records.columns)
    with atomic_file(path) as file:
        file.write(records.lines)
    for written in (path.with_suffix(".npz"), path):
        _forget(written)


def _forget(path: Path) -> None:
    """Let the system have the memory back in which it keeps a file that is on the disk.

    Few files of samples are read again. The next one is then written to memory that was in use before, which takes a third of the
    time of new memory, and what is read often stays.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # it is advice
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _save(file: IO[bytes], columns: Mapping[str, NDArray[Any]]) -> None:
    """Write an archive as `np.savez` does, which converts and copies each column first, as `np.save` does into an archive."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = np.lib.format.header_data_from_array_1_0(column)  # type: ignore[no-untyped-call]  # numpy's stubs
                np.lib.format.write_array_header_1_0(member, header)  # type: ignore[no-untyped-call]  # as above
                member.write(column.data)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` when the block ends, and is on the disk then; gone where it raises."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_records(
    path: Path, *, columns: bool = True, tell: Callable[[str], None] | None = None
) -> Iterator[Row]:
    """Yield the samples of a `.jsonl` as dicts of all fields, one by one.

    Args:
        path: the file.
        columns: whether to read the columns, too.
        tell: told of a line that is no sample, and of an archive that does not go with the file; both are left out.

    Raises:
        ConfigError: the file cannot be read; names it.
    """
    tell = tell or (lambda text: print(text, file=sys.stderr))
    archive = _archive(path.with_suffix(".npz"), tell) if columns else {}
    try:
        opened = open_regular(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError([Problem(str(path), why, "the samples of a step in a file")]) from error
    with opened, io.TextIOWrapper(opened, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file):
            if (row := _sample(line)) is None:
                tell(f"{path}, line {number + 1}: no sample in JSON; left out")
                continue
            if archive and not _is_of(archive, number, row):
                tell(
                    f"{path.with_suffix('.npz')}: is not of the lines of {path.name} any more; its columns are left out"
                )
                archive = {}
            yield _in_order(row | _columns(archive, number, row)) if archive else row


def _sample(line: str) -> Row | None:
    """Return the object of a line; None where it is none, or nested deeper than what is written of a sample."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    deepest = 2 * MAX_DEPTH
    may_be_deep = line.count("[") + line.count("{") > deepest
    return row if isinstance(row, dict) and not (may_be_deep and is_deep(row, deepest)) else None


def _archive(path: Path, tell: Callable[[str], None]) -> dict[str, NDArray[Any]]:
    """Return the arrays of an archive; none where there is none."""
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            return dict(archive)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        tell(f"{path}: cannot be read ({error}); its columns are left out")
        return {}


def _is_of(archive: Mapping[str, NDArray[Any]], number: int, row: Row) -> bool:
    index, own = archive.get("index", np.empty(0)), row.get("index")
    is_whole = own is None or isinstance(own, int)
    return is_whole and number < len(index) and bool(index[number] == (-1 if own is None else own))


def _columns(archive: Mapping[str, NDArray[Any]], number: int, row: Row) -> Row:
    """Return the columns of a line that are not in the line itself."""
    found = {}
    for name in COLUMNS:
        if name not in row and name in archive:
            start, end = archive[f"{name}_offsets"][number : number + 2]
            found[name] = archive[name][start:end].tolist()
    return found


def _in_order(row: Row) -> Row:
    """Return a row with the fields of a sample in their order, then the others."""
    return {name: row[name] for name in _FIELDS if name in row} | row
