"""The group reward `majority`: without a label, what most responses answer is right."""

from __future__ import annotations

from slime_core.rewards.results import Grade
from slime_core.rewards.workers.calling import preloads
from slime_core.samples import Sample

from slime_rm.math.boxed import last_boxed
from slime_rm.math.same_answer import PRELOAD, SAME, compare
from slime_rm.text.thought import thought_never_ends


@preloads(*PRELOAD)
def majority(group: list[Sample]) -> list[Grade]:
    r"""Score 1.0 for the samples whose last `\boxed{...}` is the answer that most of the group give, else 0.0.

    Answers are one when they mean the same (`answers.compare`). Of answers that are given equally often, the one
    that was given first counts. The part `share` is the winner's share of the group.

    Source: TTRL (arXiv:2504.16084), section 2.
    """
    answers = [
        None if thought_never_ends(sample.response) else last_boxed(sample.response) for sample in group
    ]
    classes: list[tuple[str, list[int]]] = []
    for i, answer in enumerate(answers):
        if answer is None:
            continue
        same = next((members for first, members in classes if compare(first, answer) in SAME), None)
        if same is None:
            classes.append((answer, [i]))
        else:
            same.append(i)
    winner, members = max(classes, key=lambda entry: len(entry[1]), default=(None, []))
    return [
        Grade(
            score=float(i in members),
            parts={"share": len(members) / len(group)},
            details={"answer": answer, "majority": winner},
        )
        for i, answer in enumerate(answers)
    ]
