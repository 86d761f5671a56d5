"""The reward `math`: whether the last boxed answer is the label, as text or in meaning."""

from __future__ import annotations

from slime_core.rewards.results import Grade
from slime_core.rewards.workers.calling import preloads
from slime_core.samples import Sample

from slime_rm.math.boxed import last_boxed
from slime_rm.math.same_answer import PRELOAD, SAME, compare
from slime_rm.text.labels import label_of
from slime_rm.text.thought import CUT_OFF, thought_never_ends


@preloads(*PRELOAD)
def math(sample: Sample) -> Grade:
    r"""Score 1.0 when the last `\boxed{...}` of the response is the label (`answers.compare`), else 0.0.

    The label may itself be boxed. A response without a box, whose last box never closes, or that is cut off in a
    thought (`<think>` without `</think>`) gets 0.0, and so does an answer of which some part is not understood or that would take too long to work out; the detail `why` says
    which.

    Raises:
        SampleError: the sample has no label.

    Source: slime/rollout/rm_hub/math_utils.py, from which we differ in reading an answer's structure and units
    instead of dropping them, in comparing words as text, and in bounding what is worked out.
    """
    return grade_boxed(sample.response, label_of(sample))


def grade_boxed(text: str, label: str) -> Grade:
    """Grade the last box of `text`; details say what was found and how it compares."""
    if thought_never_ends(text):
        return Grade(score=0.0, details={"answer": None, "why": CUT_OFF})
    boxed = last_boxed(text)
    if boxed is None:
        return Grade(score=0.0, details={"answer": None, "why": "no closed box"})
    comparison = compare(label, boxed)
    return Grade(score=float(comparison in SAME), details={"answer": boxed, "why": comparison})
