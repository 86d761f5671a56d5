"""The reward `math_verify`: whether math-verify finds the label in the response."""

from __future__ import annotations

from slime_core.rewards.results import Grade
from slime_core.rewards.workers.calling import preloads
from slime_core.samples import Sample

from slime_rm.math.same_answer import LIMIT_S, PRELOAD
from slime_rm.math.time_limit import LimitExceeded, cpu_limit
from slime_rm.text.labels import label_of


@preloads("slime_rm.math.extraction", *PRELOAD)
def math_verify(sample: Sample, *, window_characters: int = 2000, limit_s: float = LIMIT_S) -> Grade:
    r"""Score 1.0 when math-verify finds the label in the response, boxed, in a formula or as plain numbers.

    Unlike `math` it needs no box, and unlike the library itself it can be called in any thread and never works
    out what is too large (`magnitude`).

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
    from slime_rm.math.extraction import found_answers, gold_answers, matches  # late: imports sympy

    gold = gold_answers(label, name=sample.name)
    try:
        with cpu_limit(limit_s):
            found = found_answers(sample.response[-window_characters:])
            right = matches(gold, found)
    except LimitExceeded:
        return Grade(score=0.0, details={"answer": None, "why": f"not settled in {limit_s:g} s"})
    if not found:
        return Grade(score=0.0, details={"answer": None, "why": "no answer found"})
    return Grade(
        score=float(right),
        details={"answer": str(found[-1]), "why": "same meaning" if right else "different"},
    )
