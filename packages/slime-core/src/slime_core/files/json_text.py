"""Strict JSON parsing, with errors of one line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

#: Deepest nesting of what is read: what walks, copies or pickles it does so by recursion.
MAX_DEPTH = 100
#: What a shell, an editor or a chat makes of two hyphens, and one of them: hyphen, minus, en dash, em dash.
DASHES = "-\u2212\u2013\u2014"


def parse_json(text: str, *, with_nan: bool = False, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON text.

    Stricter than `json.loads`: a key stands once in an object, numbers are finite, text is whole characters, and nothing is
    nested deeper than `max_depth`.

    Args:
        text: of one value.
        with_nan: whether numbers may be NaN or infinite, which plain JSON lacks.
        max_depth: of objects and lists within one another.

    Raises:
        ValueError: says what is wrong, and where if that is known.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_table,
            parse_constant=float if with_nan else _constant,
            parse_float=float if with_nan else _finite,
        )
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.rstrip() else ""
        raise ValueError(f"{error.msg} at {line}column {error.colno}") from error
    except _Refused:
        raise
    except ValueError:  # of Python's own, whose integers are read up to a length
        raise ValueError("a whole number of thousands of digits") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {max_depth}") from None
    if text.count("[") + text.count("{") > max_depth and is_deep(value, max_depth):
        raise ValueError(f"nested deeper than {max_depth}")
    if "\\u" in text and not is_text(value):
        raise ValueError("half of a character (a lone surrogate)")
    return value


def shown(value: Any, limit: int = 60) -> str:
    """Return `repr(value)` as a message shows it: short, and whatever the value is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # integers of thousands of digits; what is nested deep
        return f"{type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= limit else f"{text[:limit]}..."


def why_not_text(text: str) -> str | None:
    """Return what is wrong with text that files and other programs cannot hold; None where nothing is."""
    if "\0" in text:
        return "a zero byte"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half of a character (a lone surrogate)"
    return None


def why_not_json(value: Any) -> str | None:
    """Return what stands within a value that JSON has no form for; None where all of it can be written."""
    if is_deep(value):
        return f"lists or tables nested deeper than {MAX_DEPTH}"
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, dict):
            if stray := [key for key in entry if not isinstance(key, str)]:
                return f"{shown(stray[0])} for a key"
            waiting += entry.values()
        elif isinstance(entry, list | tuple):
            waiting += entry
        elif isinstance(entry, float) and not math.isfinite(entry):
            return f"the number {entry}"
        elif entry is not None and not isinstance(entry, str | int | float):
            return f"{shown(entry)} of the type {type(entry).__name__}"
    return None


def is_text(value: Any) -> bool:
    """Return whether all text within a JSON value is whole characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_deep(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Return whether objects and lists are nested deeper than `max_depth`."""
    level = [value]
    for _ in range(max_depth):
        inner = (
            entry for held in level for entry in _entries(held) if isinstance(entry, dict | list | tuple)
        )
        level = list({id(entry): entry for entry in inner}.values())  # of YAML one may stand in many places
        if not level:
            return False
    return True


def _entries(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


class _Refused(ValueError):
    """JSON that `json` would read, and we do not."""


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _Refused(f"the key {shown(twice)} twice in one object")
    return table


def _constant(name: str) -> float:
    raise _Refused(f"{name}, which is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {text[:20]}, which is beyond any float")
    return value
