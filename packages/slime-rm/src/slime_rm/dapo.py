"""The reward `dapo`."""

from __future__ import annotations

import re

from slime_core.rewards.calling import preloads
from slime_core.rewards.results import Grade
from slime_core.sample import Sample

from slime_rm.answers import PRELOAD, SAME, Comparison, compare
from slime_rm.boxed import last_boxed
from slime_rm.labels import label_of
from slime_rm.notation import same_writing

_ANSWER_LINE = re.compile(r"answer\s*:[ \t]*([^\n]*)", re.IGNORECASE)
_MARKUP = "*_ \t"
STRICT_WINDOW = 100
"""Characters at the end of a response in which `strict_box` looks for the box."""


@preloads(*PRELOAD)
def dapo(sample: Sample, *, window_characters: int = 300, strict_box: bool = False) -> Grade:
    r"""Score 1.0 when the last line `Answer: ...` gives the label, else -1.0.

    The answer may be boxed, in bold or between dollar signs, and is compared as mathematics (`answers.compare`).
    The part `acc` is 1.0 or 0.0, the detail `pred` what was read.

    Args:
        sample: scored.
        window_characters: the line must begin within this many characters of the end.
        strict_box: instead, the last `\boxed{...}` within the last 100 characters must be written as the label is.

    Raises:
        SampleError: the sample has no label.

    Source: DAPO (arXiv:2503.14476) as in slime/rollout/rm_hub/math_dapo_utils.py, from which we differ in taking
    labels as they are (there they are cut to integers, so that 3 is right for 3.7, and text ends the rollout).
    """
    label = label_of(sample)
    if strict_box:
        pred = last_boxed(sample.response[-STRICT_WINDOW:])
        right = pred is not None and same_writing(label.strip(), pred)
        return _graded(right, pred, "same writing" if right else "different")
    pred = _answer(sample.response[-window_characters:])
    if pred is None:
        return _graded(False, None, "no line 'Answer: ...'")
    comparison: Comparison = compare(label, pred)
    return _graded(comparison in SAME, pred, comparison)


def _answer(text: str) -> str | None:
    """Return what the last `Answer:` of `text` is followed by on its line, or on the next when that is empty."""
    found = None
    for found in _ANSWER_LINE.finditer(text):  # noqa: B007  # the last one is wanted
        pass
    if found is None:
        return None
    answer = found[1].strip(_MARKUP)
    if not answer:
        answer = text[found.end() :].strip().partition("\n")[0].strip(_MARKUP)
    return last_boxed(answer) or answer


def _graded(right: bool, pred: str | None, why: str) -> Grade:
    return Grade(
        score=1.0 if right else -1.0, parts={"acc": float(right)}, details={"pred": pred, "why": why}
    )
