"""Whether a program's output is the wanted one: text as text, whole numbers exactly, decimals to a tolerance."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9
ROUNDED_PLACES = 6
"""A decimal written with so many places or more is also met by a number that rounds to it."""

_NUMBER = re.compile(r"(?<![\w.])([-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?)(?![\w.])")
_MAX_CHARACTERS = 400
"""Longest number that is read as a decimal."""


def same_text(given: str, wanted: str) -> bool:
    """Return whether two outputs are the same, line by line but for blanks at their ends.

    Where the wanted line has a decimal (`0.3`, `1e-5`), a number that `is_close` stands for it; all else, whole
    numbers too, must be written alike.
    """
    given_lines, wanted_lines = _lines(given), _lines(wanted)
    return len(given_lines) == len(wanted_lines) and all(map(_same_line, given_lines, wanted_lines))


def same_value(given: Any, wanted: Any) -> bool:
    """Return whether two JSON values are the same, where floats of the wanted one are met by numbers that are close.

    `true` is no 1 and `false` no 0, as in JSON; 1 and 1.0 are one number.
    """
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(wanted, float) and isinstance(given, int | float):
        return is_close(given, repr(wanted))
    if isinstance(wanted, list) and isinstance(given, list):
        return len(given) == len(wanted) and all(map(same_value, given, wanted))
    if isinstance(wanted, dict) and isinstance(given, dict):
        return given.keys() == wanted.keys() and all(same_value(given[key], wanted[key]) for key in wanted)
    return bool(given == wanted)


def is_close(given: float, wanted: str) -> bool:
    """Return whether a number is `wanted`, a decimal as it was written.

    It is when they differ by at most 1e-6 of the larger or by 1e-9, and when it rounds to `wanted` where that has six
    decimal places or more: `0.166667` for a sixth. NaN is no number, and an infinity only itself.
    """
    number = float(wanted)
    if abs(given) > sys.float_info.max:
        return given == number
    if math.isclose(given, number, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE):
        return True
    places = len(wanted.partition(".")[2]) if "e" not in wanted.lower() else 0
    return places >= ROUNDED_PLACES and abs(given - number) <= 0.5000001 * 10.0**-places


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_line(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    given_parts, wanted_parts = _NUMBER.split(given), _NUMBER.split(wanted)
    return len(given_parts) == len(wanted_parts) and all(map(_same_part, given_parts, wanted_parts))


def _same_part(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    decimal = _NUMBER.fullmatch(wanted) and not wanted.lstrip("+-").isdecimal()
    if not decimal or not _NUMBER.fullmatch(given) or max(len(given), len(wanted)) > _MAX_CHARACTERS:
        return False
    return is_close(float(given), wanted)
