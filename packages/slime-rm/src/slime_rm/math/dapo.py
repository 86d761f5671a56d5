"""The reward `dapo`: whether the last line `Answer: ...` is the label."""

from __future__ import annotations

import re

from slime_core.rewards.ending import without_special_tokens
from slime_core.rewards.results import Grade
from slime_core.rewards.workers.calling import preloads
from slime_core.samples import Sample

from slime_rm.math.answer.notation import same_writing
from slime_rm.math.boxed import last_boxed
from slime_rm.math.number_text import NUMBER, leaves_number
from slime_rm.math.same_answer import PRELOAD, SAME, Comparison, compare
from slime_rm.text.labels import label_of
from slime_rm.text.last_match import last_match
from slime_rm.text.thought import CUT_OFF, after_thought

_ANSWER_LINE = re.compile(r"(?<![^\W_])answer[*_` \t]*[:：][ \t]*([^\n]*)", re.IGNORECASE)
_MARKUP = '*_ \t`"“”'
_DISPLAY = {"$$": "$$", "$": "$", "\\[": "\\]", "\\(": "\\)"}
_SAYS_IS = re.compile(
    r"(?:the\s+)?(?:final\s+)?(?:answer|value|result|total|number)\s+(?:is|equals|=)\s*:?\s*", re.IGNORECASE
)
_INLINE = re.compile(r"^\\\(([^()\\]*)\\\)")
_NUMBER_AND_UNIT = re.compile(rf"({NUMBER})(.*)")
_ORDINAL = re.compile(
    r"\d[\s${}\\^]{0,9}(?:(?:text|textbf|mathrm|textsuperscript)\{)?(?:st|nd|rd|th)s?\b", re.IGNORECASE
)
STRICT_WINDOW = 100
"""Characters at the end of a response in which `strict_box` looks for the box."""


@preloads(*PRELOAD)
def dapo(sample: Sample, *, window_characters: int = 300, strict_box: bool = False) -> Grade:
    r"""Score 1.0 when the last line `Answer: ...` gives the label, else -1.0.

    The answer may be boxed, in bold or between dollar signs, and is compared as mathematics (`answers.compare`).
    A thought (up to `</think>`) does not count, and a response that is cut off in one has no answer.
    Special tokens at the end do not count, nor does the unit after a number (`number_text.leaves_number`) where the
    label has none. The part `acc` is 1.0 or 0.0, the detail `pred` what was read.

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
    solution = after_thought(sample.response)
    if solution is None:
        return _graded(False, None, CUT_OFF)
    response = without_special_tokens(solution)
    if strict_box:
        pred = last_boxed(response[-STRICT_WINDOW:])
        right = pred is not None and same_writing(label.strip(), pred)
        return _graded(right, pred, "same writing" if right else "different")
    pred = _answer(response[-window_characters:])
    if pred is None:
        return _graded(False, None, "no line 'Answer: ...'")
    if re.search(r"[^\W\d]", label):
        return _compared(label, pred, pred)
    if _ORDINAL.search(pred):
        return _graded(False, pred, "an ordinal is no number")
    return _compared(label, pred, _without_unit(pred))


def _compared(label: str, pred: str, given: str) -> Grade:
    comparison: Comparison = compare(label, given)
    return _graded(comparison in SAME, pred, comparison)


def _answer(text: str) -> str | None:
    """Return what the last `Answer:` of `text` is followed by on its line, or on the next when that is empty."""
    found = last_match(_ANSWER_LINE, text)
    if found is None:
        return None
    rest = text[found.start(1) :].lstrip(_MARKUP + "\n")
    answer = rest.partition("\n")[0].strip(_MARKUP)
    if answer in _DISPLAY:
        answer = rest.removeprefix(answer).partition(_DISPLAY[answer])[0].strip()
    if not answer.endswith(".."):  # it goes on
        answer = answer.removesuffix(".").strip(_MARKUP)
    if answer.count("}") > answer.count("{"):  # of a command around the word: \textbf{Answer:} 42
        answer = answer.removeprefix("}") if answer.startswith("}") else answer.removesuffix("}")
    return last_boxed(answer) or _SAYS_IS.sub("", answer, count=1).strip()


def _without_unit(answer: str) -> str:
    """Return the number of an answer such as `100 dollars`; other answers as they are."""
    bare = answer.replace("$", "") if answer.count("$") == 2 else _INLINE.sub(r"\1", answer)
    found = _NUMBER_AND_UNIT.fullmatch(bare.strip())
    return found[1] if found is not None and found[2].strip() and leaves_number(found[2]) else answer


def _graded(right: bool, pred: str | None, why: str) -> Grade:
    return Grade(
        score=1.0 if right else -1.0, parts={"acc": float(right)}, details={"pred": pred, "why": why}
    )
