"""The score of a response to a gym problem, by the task's own scorer."""

from __future__ import annotations

import math
from dataclasses import replace

from slime_core.errors import SampleError
from slime_core.rewards.ending import without_special_tokens
from slime_core.rewards.results import Grade
from slime_core.samples import Sample

from slime_gym.problems import ORIGIN_KEY, Origin


def gym(sample: Sample, *, partial: bool = False) -> Grade:
    """Score the start of the response with the scorer of the task that the problem comes from.

    The answer is the first line of the response, stripped; where the task's own answer has more lines, that many. Special tokens at
    the end of the response (`<|im_end|>`) are no part of it.

    Args:
        sample: from the source `gym`.
        partial: return the scorer's partial scores; otherwise 1.0 for a full score and 0.0 for any other.

    Returns:
        From 0.0 to 1.0. What the scorer cannot take is 0, and the detail `failed` says why.

    Raises:
        SampleError: the sample is not from the source `gym`, or the problem cannot be made again as it was.
    """
    if ORIGIN_KEY not in sample.metadata:
        raise SampleError(
            f"{sample.name}: metadata has no {ORIGIN_KEY!r}; use --data-source-path gym with this reward"
        )
    origin = Origin(**sample.metadata[ORIGIN_KEY])
    answer = origin.entry()["answer"]
    if answer != sample.label:
        raise SampleError(
            f"{sample.name}: label is {sample.label!r}, its problem now has the answer {answer!r}; "
            "the reasoning-gym of this process is another version than the source's"
        )
    n_lines = 1 if answer is None else len(answer.splitlines())
    lines = without_special_tokens(sample.response).strip().splitlines()[:n_lines]
    grade = _graded(origin, "\n".join(lines).strip()) if lines else Grade(score=0.0)
    return grade if partial else replace(grade, score=float(grade.score >= 1.0))


def attempt(sample: Sample) -> Grade:
    """Score the whole response as an answer, partial scores included; what the scorer cannot take is 0, and `failed` says why."""
    origin = Origin(**sample.metadata[ORIGIN_KEY])
    origin.entry()  # a problem that cannot be made again is not the answer's fault
    return _graded(origin, sample.response)


def _graded(origin: Origin, answer: str) -> Grade:
    """Score an answer. Scorers evaluate answers, some of them as Python: what one raises is the answer's fault."""
    try:
        score = origin.score(answer)
    except BaseException as error:  # an answer may call exit()
        return Grade(score=0.0, details={"failed": f"the scorer raised {type(error).__name__}: {error}"})
    if not math.isfinite(score):
        return Grade(score=0.0, details={"failed": f"the scorer gave {score}"})
    return Grade(score=score)
