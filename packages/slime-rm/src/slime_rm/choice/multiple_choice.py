"""The reward `multiple_choice`: whether a response decides for the right letter."""

from __future__ import annotations

import string

from slime_core.errors import SampleError
from slime_core.rewards.results import Grade
from slime_core.samples import Sample

from slime_rm.choice.decision import Decision, decide
from slime_rm.text.labels import label_of


def multiple_choice(sample: Sample, *, letters: str = string.ascii_uppercase[:10]) -> Grade:
    """Score 1.0 when the response decides for the option that the label names, else 0.0 (`choice.decide`).

    Args:
        sample: scored; its label is a letter, `B` or `(B)`.
        letters: the options that there are, capitals.

    Raises:
        SampleError: the sample has no label, or one that is no option: several, a number, a text.
    """
    label = label_of(sample)
    wanted = label.strip().strip("().:").upper()
    if len(wanted) != 1 or wanted not in letters:
        raise SampleError(
            f"{sample.name}: label is {label[:200]!r}; wanted the letter of an option, one of {letters}; "
            "`gpqa` reads indices and texts of options too"
        )
    return grade_decision(decide(sample.response, letters), wanted)


def grade_decision(decision: Decision, wanted: str) -> Grade:
    """Grade a decision; details say what was decided, or why nothing was."""
    right = decision.letter == wanted
    why = decision.why if decision.letter is None else "same option" if right else "different"
    return Grade(score=float(right), details={"answer": decision.letter, "why": why})
