"""The reward `gsm8k`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from slime_core.errors import SampleError
from slime_core.rewards.results import Grade
from slime_core.sample import Sample

from slime_rm.labels import label_of

_NUMBER = r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?\.\d+"
_FINAL = re.compile(rf"\s*({_NUMBER})(?![\d,.]*\d)")
_ANY = re.compile(rf"(?<![\w.,])(?:{_NUMBER})(?![\w])(?!\.\d)")
_WHOLE = re.compile(_NUMBER)
MAX_DIGITS = 1000
"""Longest number that is read."""


def gsm8k(
    sample: Sample,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> Grade:
    """Score 1.0 when the number after the last `####` of the response is the label's, else 0.0.

    Numbers are compared as numbers: `1,000`, `$1000` and `1000.00` are one. The label is a number, or a whole
    GSM8K solution that ends in `#### 72`.

    Args:
        sample: scored.
        method: `strict` wants the `####`; `flexible` takes the last number of the response.
        format_score: score of a wrong number in the right form.

    Raises:
        SampleError: the sample has no label, or its label is not a number.

    Source: Cobbe et al. 2021 (arXiv:2110.14168); verl/utils/reward_score/gsm8k.py, which compares text.
    """
    wanted = _label(sample)
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k: method is {method!r}; wanted 'strict' or 'flexible'")
    text = sample.response[-10 * MAX_DIGITS :]
    if method == "strict":
        final = _FINAL.match(text.rpartition("####")[2]) if "####" in text else None
        found = [final[1]] if final is not None else []
    else:
        found = _ANY.findall(text)
    given = _number(found[-1]) if found else None
    if given is None:
        return Grade(score=0.0, details={"answer": None, "why": "no final number"})
    right = given == wanted
    return Grade(
        score=1.0 if right else format_score,
        parts={"acc": float(right)},
        details={"answer": found[-1], "why": "same number" if right else "different"},
    )


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
    digits = text.replace(",", "").replace("$", "")
    return Fraction(digits) if len(digits) <= MAX_DIGITS else None
