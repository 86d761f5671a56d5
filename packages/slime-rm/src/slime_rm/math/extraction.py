"""What math-verify reads out of a text, bounded. Importing this takes seconds."""

from __future__ import annotations

import re
from typing import Any

from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
from slime_core.errors import SampleError

from slime_rm.math.answer.magnitude import is_tractable
from slime_rm.math.answer.notation import depth, plain
from slime_rm.math.math_verify_compat import parse, verify
from slime_rm.math.number_text import NUMBER, leaves_number
from slime_rm.math.same_answer import MAX_DEPTH

_GOLD = (LatexExtractionConfig(), ExprExtractionConfig())
_MARKED = re.compile(r"\$[^$]+\$|\\[(\[]|\\(?:boxed|fbox)(?![A-Za-z])")
_NUMBER_AND_WORDS = re.compile(rf"({NUMBER}(?:/\d{{1,30}})?)([\s\w°²³^/'’.-]*)", re.ASCII)
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_PI_COMMAND = r"\\pi "
_GIVEN = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def gold_answers(label: str, *, name: str) -> list[Any]:
    """Return the label as math-verify reads it.

    In plain text math-verify finds numbers only, the 2 of `2\\pi`; so a label without dollars or a box is read as one
    formula, a unit behind its number aside.

    Raises:
        SampleError: it reads nothing; `name` is the sample's.
    """
    gold: list[Any] = []
    for text in (label,) if _MARKED.search(label) else (_formula(label), f"${label}$"):
        gold = gold if _is_read(gold) else parse(text, _GOLD)
    if not _is_read(gold):  # text that it could not read is returned as it was
        raise SampleError(
            f"{name}: label is {label[:200]!r}; wanted mathematics that math-verify can read (use the reward `exact` for text)"
        )
    return gold


def _is_read(answers: list[Any]) -> bool:
    return any(not isinstance(answer, str) for answer in answers)


def _formula(label: str) -> str:
    text = label.replace("\\$", "").replace("$", "").strip()
    number = _NUMBER_AND_WORDS.fullmatch(text)
    if number is not None and leaves_number(number[2]):
        return number[1]
    return f"${_PI.sub(_PI_COMMAND, plain(text))}$"


def found_answers(text: str) -> list[Any]:
    """Return the answers in `text` as math-verify reads them; none where brackets nest too deep to be parsed."""
    if depth(text) > MAX_DEPTH:
        return []
    return parse(text, _GIVEN)


def matches(gold: list[Any], found: list[Any]) -> bool:
    """Return whether an answer equals the label; one too large to be worked out equals nothing."""
    if not found or not all(map(is_tractable, [*gold, *found])):
        return False
    return verify(gold, found)
