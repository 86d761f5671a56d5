"""The reward `multiple_choice`."""

from __future__ import annotations

import string

from slime_core.errors import SampleError
from slime_core.rewards.results import Grade
from slime_core.sample import Sample

from slime_rm.choice import chosen_letter
from slime_rm.labels import label_of


def multiple_choice(sample: Sample, *, letters: str = string.ascii_uppercase[:10]) -> Grade:
    """Score 1.0 when the response decides for the option that the label names, else 0.0 (`choice.chosen_letter`).

    Args:
        sample: scored; its label is a letter, `B` or `(B)`.
        letters: the options that there are, capitals.

    Raises:
        SampleError: the sample has no label, or one that is no option.
    """
    label = label_of(sample)
    wanted = label.strip().strip("().:").upper()
    if len(wanted) != 1 or wanted not in letters:
        raise SampleError(
            f"{sample.name}: label is {label!r}; wanted the letter of an option, one of {letters}"
        )
    return grade_letter(chosen_letter(sample.response, letters), wanted)


def grade_letter(chosen: str | None, wanted: str) -> Grade:
    """Grade a decision; details say what was chosen."""
    why = "decides for no option" if chosen is None else "same option" if chosen == wanted else "different"
    return Grade(score=float(chosen == wanted), details={"answer": chosen, "why": why})
