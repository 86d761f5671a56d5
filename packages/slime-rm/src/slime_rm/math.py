"""The reward `math`."""

from __future__ import annotations

from slime_core.sample import Sample

from slime_rm.boxed import last_boxed
from slime_rm.labels import label_of
from slime_rm.notation import plain, same_writing, words

MAX_CHARACTERS = 500
"""Longest answer that is read as mathematics; a longer one must be written as the label is."""


def math(sample: Sample) -> float:
    r"""Return 1.0 when the last `\boxed{...}` of the response answers like the label, else 0.0.

    They answer alike when they are written alike (`notation`), or, unless both are words, mean the same
    (`equivalence`). The label may itself be boxed. A response without a box, or whose last box never closes, gets
    0.0, and so does an answer that cannot be parsed or would take too long to work out.

    Raises:
        SampleError: the sample has no label.

    Source: slime/rollout/rm_hub/math_utils.py, from which we differ in using math-verify for what sympy is asked,
    in comparing words as text, and in bounding what is worked out.
    """
    label = label_of(sample)
    boxed = last_boxed(sample.response)
    if boxed is None:
        return 0.0
    wanted, given = last_boxed(label) or label, boxed
    if max(len(wanted), len(given)) <= MAX_CHARACTERS:
        return float(_alike(plain(wanted), plain(given)))
    return float(same_writing(wanted, given))


def _alike(wanted: str, given: str) -> bool:
    if not given:
        return False
    if same_writing(wanted, given):
        return True
    wanted_words, given_words = words(wanted), words(given)
    if wanted_words is not None and given_words is not None:
        return wanted_words == given_words
    # Not at the top: sympy takes seconds to import, and most answers do not need it.
    from slime_rm.equivalence import equivalent

    return equivalent(wanted, given)
