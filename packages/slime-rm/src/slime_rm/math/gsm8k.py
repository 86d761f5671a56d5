"""The reward `gsm8k`: whether the number after the last `####` is the label's."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from slime_core.errors import SampleError
from slime_core.rewards.ending import without_special_tokens
from slime_core.rewards.results import Grade
from slime_core.samples import Sample

from slime_rm.math.boxed import last_boxed
from slime_rm.math.hedges import taken_back
from slime_rm.math.number_text import MARKUP, NUMBER, changes_number, leaves_number
from slime_rm.text.labels import label_of
from slime_rm.text.last_match import last_match
from slime_rm.text.thought import CUT_OFF, after_thought

_WHOLE = re.compile(NUMBER)
_FINAL = re.compile(rf"(?:[\s*_`$(\[]|\\[(\[])*(?P<number>{NUMBER})(?P<rest>[^\n]*)")
#: A number with all that is written onto it: `72/2`, `10:30`, `1.2.2`, `72%`, `72e2`.
_RUN = re.compile(r"(?<![\w.,])[-+−\\$€£(]{0,4}(?:\d|\.\d)(?:[\w.,:/^%‰°!-]|\s*[-−+*/^×÷]\s*(?=[\d.$(]))*")
_HEDGED = re.compile(
    r"(?:\b(?:not|never|isn't|or|and/or|either|between)|\d\s*(?:to|through|till|until)|\bbetween\b.*\band)[\s*_`$]*\Z",
    re.IGNORECASE,
)
MAX_DIGITS = 1000
"""Longest number that is read."""


def gsm8k(
    sample: Sample,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> Grade:
    """Score 1.0 when the number after the last `####` of the response is the label's, else 0.0.

    A thought (up to `</think>`) does not count, and a response that is cut off in one has no answer.
    Numbers are compared as numbers: `1,000`, `$1000` and `1000.00` are one. The label is a number, or a whole
    GSM8K solution that ends in `#### 72`. A unit may follow the number, and nothing that makes another number of it or
    leaves it open (`72/2`, `72%`, `72 dozen`, `72 or 73`); nor may a later line name another number or take this
    one back ("wait", "that is wrong").

    Args:
        sample: scored.
        method: `strict` wants the `####`; `flexible` takes the last number of the response, with all that is written
            onto it.
        format_score: score of a wrong number in the right form.

    Raises:
        SampleError: the sample has no label, or its label is not a number.

    Source: Cobbe et al. 2021 (arXiv:2110.14168); verl/utils/reward_score/gsm8k.py, which compares text and ignores
    what follows the number.
    """
    wanted = _label(sample)
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: method is {method!r}; wanted 'strict' or 'flexible'")
    solution = after_thought(sample.response)
    if solution is None:
        return Grade(score=0.0, details={"answer": None, "why": CUT_OFF})
    text = without_special_tokens(solution)[-10 * MAX_DIGITS :]
    found, why = _strict(text) if method == "strict" else _flexible(text)
    given = _number(found) if found is not None else None
    if found is None or given is None:
        return Grade(score=0.0, details={"answer": None, "why": why})
    right = given == wanted
    return Grade(
        score=1.0 if right else format_score,
        parts={"acc": float(right)},
        details={"answer": found, "why": "same number" if right else "different"},
    )


def _strict(text: str) -> tuple[str | None, str]:
    """Return the number after the last `####`, or why there is none."""
    _, marked, answer = text.rpartition("####")
    first, _, later = answer.strip().partition("\n")
    final = _FINAL.match(last_boxed(first) or first) if marked else None
    if final is None:
        return None, "no final number"
    if not leaves_number(final["rest"]):
        return None, f"what follows the number changes it: {final[0].strip()[:60]!r}"
    value = _number(final["number"])
    if any(_number(other[0]) != value for other in re.finditer(NUMBER, later)):
        return None, "another number follows the final one"
    if (why := taken_back(later)) is not None:
        return None, why
    return final["number"], ""


def _flexible(text: str) -> tuple[str | None, str]:
    """Return the last number of a text, or why it is none."""
    run = last_match(_RUN, text)
    if run is None:
        return None, "no final number"
    final = _FINAL.fullmatch(run[0].rstrip(".,:!-"))
    after = re.match(r"[^\n.,;:!?()]*", text[run.start() + len(run[0].rstrip(".,:!-")) :])
    if (
        final is None
        or not leaves_number(final["rest"])
        or _HEDGED.search(text[: run.start()][-60:])
        or (
            (after is not None and changes_number(after[0].lstrip(MARKUP)))
            and not re.match(
                r"\s+(?:is|was|and|but|if|to|or|than|more|less|fewer|in|of|no)\b", after[0], re.IGNORECASE
            )
        )
    ):
        return None, f"the last number is no number by itself: {run[0][:60]!r}"
    return final["number"], ""


def _label(sample: Sample) -> Fraction:
    label = label_of(sample)
    text = label.rpartition("####")[2].strip()
    number = _number(text) if _WHOLE.fullmatch(text) else None
    if number is None:
        raise SampleError(
            f"{sample.name}: label is {label[:200]!r}; wanted a number, or a solution that ends in '#### 72'"
        )
    return number


def _number(text: str) -> Fraction | None:
    digits = re.sub(r"US|[,$€£\\+]", "", text.replace("−", "-"))
    return Fraction(digits) if len(digits) <= MAX_DIGITS and digits.count("-") <= 1 else None
