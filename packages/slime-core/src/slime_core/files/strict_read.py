"""Strict reading of files of a run folder, which may have been truncated, edited or damaged since they were written."""

from __future__ import annotations

import errno
import io
import os
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated, Any

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError

from slime_core.files.json_text import MAX_DEPTH, parse_json

#: Characters of what was found that a message shows.
_SHOWN = 200
#: A number of steps, or of anything else that is counted one by one.
Counted = Annotated[int, Ge(0), Le(10**15)]


class Unreadable(ValueError):
    """A file does not hold what it should; the message says what was found in it."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to be read. A pipe without a writer would be waited for, and a device has no end.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    why = os.strerror(kind) if kind == errno.EISDIR else "a pipe or a device, not a file"
    raise OSError(kind, why, str(path))


def read_text(path: Path) -> str:
    """Return what a file holds as text in UTF-8, its lines ended by line feeds.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
        return text.read()


def read_file(path: Path) -> bytes:
    """Return what a file holds.

    Raises:
        Unreadable: it is a folder, or cannot be read.
        FileNotFoundError: there is none.
    """
    try:
        if path.exists() and not path.is_file():
            raise Unreadable("no file")
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"a file that cannot be read ({error.strerror})") from error


def json_object(data: bytes, *, with_nan: bool = False) -> dict[str, Any]:
    """Return the one JSON object that text in UTF-8 holds; see `parse_json`. It may wrap what was as deep as data may be.

    Args:
        data: the text.
        with_nan: whether numbers may be NaN or infinite, which plain JSON lacks.

    Raises:
        Unreadable: it holds anything else.
    """

    text = _text(data)
    try:
        value = parse_json(text, with_nan=with_nan, max_depth=2 * MAX_DEPTH)
    except ValueError as error:
        raise Unreadable(_short(f"no JSON ({error})")) from None
    if not isinstance(value, dict):
        raise Unreadable(f"a JSON {type(value).__name__}")
    return value


def toml_tables(data: bytes) -> dict[str, dict[str, Any]]:
    """Return the tables of a TOML text in UTF-8, which holds nothing beside them.

    Raises:
        Unreadable: it holds anything else.
    """
    try:
        tables = tomllib.loads(_text(data))
    except RecursionError:
        raise Unreadable("TOML nested too deep") from None
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(_short(f"no TOML ({error})")) from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise Unreadable(_short(f"{name!a} outside of a table"))
    return tables


def checked[M: BaseModel](model: type[M], values: dict[str, Any]) -> M:
    """Return values as a model of what they are to be.

    Raises:
        Unreadable: one is missing or of another type; names the first, and what was wanted of it.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise Unreadable(_short(f"{_place(first['loc'])}: {_reason(first)}")) from None


def _text(data: bytes) -> str:
    if not data:
        raise Unreadable("nothing")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"bytes that are not UTF-8, at {error.start}") from None


def _place(path: Sequence[int | str]) -> str:
    return ".".join(map(str, path)) or "the whole"


def _reason(error: Any) -> str:
    if error["type"] == "missing":
        return "missing"
    try:
        shown = ascii(error["input"])
    except (ValueError, RecursionError):  # an int of thousands of digits has no text
        shown = "a value too long to show"
    return f"{shown[:60]}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
