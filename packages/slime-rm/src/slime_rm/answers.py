"""Whether two final answers are the same answer: what all mathematical graders ask."""

from __future__ import annotations

from typing import Literal

from slime_rm.boxed import last_boxed
from slime_rm.limit import LimitExceeded, cpu_limit
from slime_rm.notation import plain, same_writing, words

MAX_CHARACTERS = 500
"""Longest answer that is read as mathematics; a longer one must be written as the label is."""
LIMIT_S = 5.0
"""Computing time after which two answers count as different, seconds."""
PRELOAD = ("slime_rm.equivalence:warm_up",)
"""What graders that call `compare` do first: sympy is imported late, and slow at its first answer."""

Comparison = Literal[
    "same writing", "same words", "same meaning", "different", "empty", "not settled in time"
]
SAME: frozenset[Comparison] = frozenset({"same writing", "same words", "same meaning"})


def compare(label: str, answer: str) -> Comparison:
    r"""Say how `answer` relates to `label`, which may be boxed.

    They are the same when they are written alike (`notation`), or, unless both are words, mean the same
    (`equivalence`). An answer that cannot be parsed, or takes too long to work out, is not the label.
    """
    wanted = last_boxed(label) or label
    if max(len(wanted), len(answer)) > MAX_CHARACTERS:
        return "same writing" if same_writing(wanted, answer) else "different"
    wanted, given = plain(wanted), plain(answer)
    if not given:
        return "empty"
    if same_writing(wanted, given):
        return "same writing"
    wanted_words, given_words = words(wanted), words(given)
    if wanted_words is not None and given_words is not None:
        return "same words" if wanted_words == given_words else "different"
    # Not at the top: sympy takes seconds to import, and most answers do not need it.
    from slime_rm.equivalence import equivalent

    try:
        with cpu_limit(LIMIT_S):
            return "same meaning" if equivalent(wanted, given) else "different"
    except LimitExceeded:
        return "not settled in time"
