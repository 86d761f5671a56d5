r"""Rewards that read what the last `\boxed{...}` of a response holds, in place of the response."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from slime_core.rewards.results import Grade
from slime_core.samples import Sample

from slime_rm.choice.gpqa import gpqa
from slime_rm.choice.multiple_choice import multiple_choice
from slime_rm.math.boxed import last_boxed
from slime_rm.text.exact import exact
from slime_rm.text.f1 import f1
from slime_rm.text.thought import thought_never_ends


def of_box[G: float | Grade](reward: Callable[..., G]) -> Callable[..., G | Grade]:
    """Return a reward that hands `reward` the sample with its box's content as response, with the same options.

    Without a closed box, or where the response was cut off while it thought, the score is 0.0, after the label has been
    checked.
    """

    @functools.wraps(reward)
    def boxed(sample: Sample, **options: Any) -> G | Grade:
        cut_off = thought_never_ends(sample.response)
        content = None if cut_off else last_boxed(sample.response)
        graded = reward(dataclasses.replace(sample, response=content or ""), **options)
        if content is None:
            return Grade(
                score=0.0,
                details={"answer": None, "why": "its thought never ends" if cut_off else "no closed box"},
            )
        return graded

    return boxed


boxed_exact = of_box(exact)
boxed_f1 = of_box(f1)
boxed_gpqa = of_box(gpqa)
boxed_multiple_choice = of_box(multiple_choice)
