"""`compare`: whether two final answers are the same; all rewards for mathematics use it."""

from __future__ import annotations

import re

from slime_rm.math.answer.notation import depth, plain, same_words, same_writing
from slime_rm.math.answer.tokens import NotUnderstood, tokenize
from slime_rm.math.boxed import last_boxed
from slime_rm.math.time_limit import LimitExceeded, cpu_limit

MAX_CHARACTERS = 500
"""Longest answer that is read as mathematics; a longer one must be written as the label is."""
MAX_DEPTH = 12
"""Deepest nesting of brackets that is read."""
LIMIT_S = 5.0
"""Computing time after which two answers count as different, seconds."""
PRELOAD = ("slime_rm.math.answer.equivalence:warm_up",)
"""What graders that call `compare` do first: sympy is imported late, and slow at its first answer."""

Comparison = str
"""What a comparison comes to: one of `SAME`, or why the answer is not the label."""
SAME: frozenset[Comparison] = frozenset({"same writing", "same words", "same meaning"})
ONLY_WRITING = "different; of the label only its own writing is accepted"
"""How a comparison begins that a label decides which is not mathematics that we read."""
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")
_FULL_HOUR = re.compile(r"(?<=\d):00(?=[ap]m)")


def compare(label: str, answer: str) -> Comparison:
    r"""Say how `answer` relates to `label`, which may be boxed.

    They are the same when they are written alike (`notation`), or, unless both are words, mean the same
    (`equivalence`). An answer of which some part is not understood, or that takes too long to work out, is not the
    label: what comes back says which part.
    """
    wanted = last_boxed(label) or label
    if max(len(wanted), len(answer)) > MAX_CHARACTERS:
        return "same writing" if same_writing(wanted, answer) else "different"
    wanted, given = plain(wanted), plain(answer)
    if not given:
        return "empty"
    if same_writing(wanted, given):
        return "same writing"
    if (alike := same_words(wanted, given)) is not None:
        return "same words" if alike else "different"
    if max(map(depth, (wanted, given))) > MAX_DEPTH:
        return "refused: brackets nest too deep"
    try:
        with cpu_limit(LIMIT_S):
            return _meaning(wanted, given)
    except LimitExceeded:
        return "not settled in time"


def _meaning(wanted: str, given: str) -> Comparison:
    # Not at the top: sympy takes seconds to import, and most answers do not need it.
    from slime_rm.math.answer.equivalence import difference, read_label

    try:
        label, letters = read_label(wanted)
    except NotUnderstood as error:
        if _text(wanted) == _text(given):
            return "same words"
        return f"{ONLY_WRITING}: {error}"
    try:
        return difference(label, letters, given) or "same meaning"
    except NotUnderstood as error:
        return f"refused: {error}"
    except Exception as error:  # what sympy raises is its own affair, and a policy wrote what it was given
        return f"refused: sympy failed with {type(error).__name__}"


def _text(answer: str) -> str:
    """Return what `answer` says as words and numbers, in small letters, without markup: `june 20`, `8am`."""
    try:
        tokens = tokenize(answer)
    except NotUnderstood:
        return answer
    text = "".join(
        (" " if i and token.kind == tokens[i - 1].kind == "number" else "") + token.text.lower()
        for i, token in enumerate(tokens)
        if token.text not in ("{", "}")
    )
    if text.startswith(r"\{"):
        text = text.replace("|", ":")  # of what stands before and behind the condition of a set
    return _FULL_HOUR.sub("", _ORDINAL.sub("", text))
