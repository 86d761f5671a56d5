"""What math-verify reads out of a text, bounded. Importing this takes seconds."""

from __future__ import annotations

from typing import Any

from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
from slime_core.errors import SampleError

from slime_rm.math.answer.magnitude import is_tractable
from slime_rm.math.answer.notation import depth
from slime_rm.math.math_verify_compat import parse, verify
from slime_rm.math.same_answer import MAX_DEPTH

_GOLD = (LatexExtractionConfig(), ExprExtractionConfig())
_GIVEN = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def gold_answers(label: str, *, name: str) -> list[Any]:
    """Return the label as math-verify reads it.

    Raises:
        SampleError: it reads nothing; `name` is the sample's.
    """
    gold: list[Any] = parse(label, _GOLD) or parse(f"${label}$", _GOLD)
    if all(isinstance(answer, str) for answer in gold):  # text that it could not read is returned as it was
        raise SampleError(
            f"{name}: label is {label[:200]!r}; wanted mathematics that math-verify can read (use the reward `exact` for text)"
        )
    return gold


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
