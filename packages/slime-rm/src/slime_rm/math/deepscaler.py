"""The reward `deepscaler`: `math` on what follows the thought."""

from __future__ import annotations

from slime_core.rewards.results import Grade
from slime_core.rewards.workers.calling import preloads
from slime_core.samples import Sample

from slime_rm.math.math import grade_boxed
from slime_rm.math.same_answer import PRELOAD
from slime_rm.text.labels import label_of
from slime_rm.text.thought import thought_never_ends

#: Marks behind which the solution stands, the first that occurs counts; what precedes is thought.
MARKS = ("</think>", "###Response")


@preloads(*PRELOAD)
def deepscaler(sample: Sample, *, require_thought: bool = False) -> Grade:
    r"""Score 1.0 when the last `\boxed{...}` after the thought is the label, else 0.0.

    The thought ends at the last `</think>`, or where there is none at the last `###Response`. A box inside the
    thought does not count.

    Args:
        sample: scored.
        require_thought: give 0.0 to a response without either mark; otherwise all of it is the solution,
            unless it opens a thought (`<think>`).

    Raises:
        SampleError: the sample has no label.

    Source: slime/rollout/rm_hub/deepscaler.py, from which we differ in what a response without a mark gets (there
    always 0, so that a model that does not think aloud never learns), in taking what follows the last
    `###Response` (there the first), and in refusing a missing label (there 0).
    """
    label = label_of(sample)
    if thought_never_ends(sample.response):
        return grade_boxed(sample.response, label)
    for mark in MARKS:
        _, found, solution = sample.response.rpartition(mark)
        if found:
            return grade_boxed(solution, label)
    if require_thought:
        return Grade(score=0.0, details={"answer": None, "why": "no thought that ends"})
    return grade_boxed(sample.response, label)
