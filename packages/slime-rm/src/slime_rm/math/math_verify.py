"""The reward `math_verify`: whether math-verify finds the label in the response."""

from __future__ import annotations

import re
from typing import Any

from slime_core.rewards.results import Grade
from slime_core.rewards.workers.calling import preloads
from slime_core.samples import Sample

from slime_rm.math.boxed import all_boxed
from slime_rm.math.hedges import hedge
from slime_rm.math.same_answer import LIMIT_S, ONLY_WRITING, PRELOAD, SAME, compare
from slime_rm.math.time_limit import LimitExceeded, cpu_limit
from slime_rm.text.labels import label_of
from slime_rm.text.thought import CUT_OFF, after_thought

_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|\\text|\d\s+\d")


@preloads("slime_rm.math.extraction", *PRELOAD)
def math_verify(sample: Sample, *, window_characters: int = 2000, limit_s: float = LIMIT_S) -> Grade:
    r"""Score 1.0 when math-verify finds the label in the response, boxed, in a formula or as plain numbers.

    Unlike `math` it needs no box. Unlike the library itself it can be called in any thread, never works out what is too
    large (`magnitude`), and does not overlook what it cannot read: a boxed answer must also be the label in the eyes of
    `compare`, wherever that can read the label, and of an answer in running text the words next to it must not say
    otherwise (`hedges`). A thought (up to `</think>`) does not count.

    Args:
        sample: scored.
        window_characters: only this many characters at the end of the response are read.
        limit_s: computing time after which the answer counts as wrong, seconds.

    Raises:
        SampleError: the sample has no label, or one that math-verify cannot read.

    Source: math-verify 0.9; verl/utils/reward_score/math_verify.py. There the library's own limits use signals,
    which fail in threads, and the failure becomes a 0.
    """
    label = label_of(sample)
    from slime_rm.math.extraction import gold_answers  # late: imports sympy

    gold = gold_answers(label, name=sample.name)
    solution = after_thought(sample.response)
    if solution is None:
        return _grade(None, CUT_OFF)
    text = solution[-window_characters:]
    boxes = all_boxed(text)
    if not boxes:
        return _unboxed(gold, label, text, limit_s)
    answer = boxes[-1]
    if answer is None:
        return _grade(None, "the last box never closes")
    if len(set(boxes)) > 1:
        return _checked(label, *_found(gold, text, limit_s))
    comparison = compare(label, answer)
    if comparison in SAME or not _is_left_to_library(label, comparison):
        return _grade(answer, comparison)
    return _grade(*_found(gold, text, limit_s))


def _unboxed(gold: list[Any], label: str, text: str, limit_s: float) -> Grade:
    """Grade a response without a box: what the library finds, unless words around it or `compare` say otherwise."""
    answer, why = _found(gold, text, limit_s)
    if answer is not None and (words := hedge(text, answer)) is not None:
        return _grade(answer, words)
    return _checked(label, answer, why)


def _checked(label: str, answer: str | None, why: str) -> Grade:
    """Grade what the library found and judged, where `compare` can read the label by what that says."""
    if answer is None:
        return _grade(None, why)
    comparison = compare(label, answer)
    return _grade(answer, why if _is_left_to_library(label, comparison) else comparison)


def _found(gold: list[Any], text: str, limit_s: float) -> tuple[str | None, str]:
    """Return the answer that math-verify finds in `text`, and how it compares."""
    from slime_rm.math.extraction import found_answers, matches  # late: imports sympy

    try:
        with cpu_limit(limit_s):
            found = found_answers(text)
            right = matches(gold, found)
    except LimitExceeded:
        return None, f"not settled in {limit_s:g} s"
    if not found:
        return None, "no answer found"
    return str(found[-1]).lstrip("*_ ").rstrip("*_ .") or None, "same meaning" if right else "different"


def _is_left_to_library(label: str, comparison: str) -> bool:
    """Return whether a label is mathematics that `compare` cannot read, so that it has no say."""
    return comparison.startswith(ONLY_WRITING) and not _WORDS.search(label)


def _grade(answer: str | None, why: str) -> Grade:
    return Grade(score=float(why in SAME), details={"answer": answer, "why": why})
