"""Whether two answers in LaTeX mean the same, by sympy. Importing this takes seconds."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

from math_verify.parser import LatexExtractionConfig
from sympy import Basic, Float

from slime_rm.magnitude import is_tractable
from slime_rm.unlimited import parse, verify

MAX_DEPTH = 12
"""Deepest nesting of brackets that is parsed; the parser's time grows fast with it."""
RELATIVE_TOLERANCE = 1e-5
"""Decimals further apart than this are different, however small they are."""

_BRACKET = re.compile(r"[{(\[]|[})\]]")
# Only the whole answer counts: searching it for a number that fits would reward listing many.
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)


def equivalent(label: str, answer: str) -> bool:
    """Return whether `answer` equals `label` mathematically.

    What cannot be parsed, or is too large to work out (`magnitude`), equals nothing. Units are ignored, `10\\%` is
    both 0.1 and 10, and a decimal equals what it rounds to 6 places.

    Args:
        label: at most some hundred characters, as `answer`: the parser's time grows faster than the text.
        answer: in the writing of `notation.plain`, as `label`.

    Uses no signals, so it runs in any thread; who needs a hard deadline must run it in a process of its own.
    """
    if not (is_parsable(label) and is_parsable(answer)):
        return False
    wanted, given = _parsed(label), _parsed(answer)
    if not wanted or not given or not all(map(is_tractable, [*wanted, *given])):
        return False
    if not verify(wanted, given):
        return False
    if "=" not in label and _contradicts_itself(answer):
        return False
    return "%" in label + answer or not _far_apart(wanted[0], given[0])


def warm_up() -> None:
    """Compare what takes the parser and sympy through their first steps, which cost a second once a process."""
    equivalent(r"\frac{1}{2}+\sqrt{8}", r"2\sqrt{2}+0.5")


def is_parsable(answer: str) -> bool:
    """Return whether brackets nest at most `MAX_DEPTH` deep."""
    depths = accumulate(1 if bracket[0] in "{([" else -1 for bracket in _BRACKET.finditer(answer))
    return max(depths, default=0) <= MAX_DEPTH


def _parsed(answer: str) -> list[Any]:
    return parse(rf"\boxed{{{answer}}}", _EXTRACTION)


def _contradicts_itself(answer: str) -> bool:
    """Return whether an answer such as `4=5` equates a number with another, of which only the last would count."""
    first, *others = answer.split("=")
    numbers = _parsed(first) if others else []
    if not numbers or not isinstance(numbers[0], Basic) or not numbers[0].is_number:
        return False
    return not verify(numbers, _parsed(others[-1]))


def _far_apart(one: Any, other: Any) -> bool:
    """Return whether two numbers, one of them a decimal, differ by more than the relative tolerance.

    math-verify rounds to a fixed number of places, so that 0 would pass for every small number.
    """
    if not all(isinstance(x, Basic) and x.is_number for x in (one, other)) or not (
        one.has(Float) or other.has(Float)
    ):
        return False
    a, b = one.evalf(), other.evalf()
    return bool(abs(a - b) > RELATIVE_TOLERANCE * max(abs(a), abs(b)))
