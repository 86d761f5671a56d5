"""DAPO's reward."""

from typing import Any

from slime_compat.views.running.absent import lacking
from slime_compat.views.samples.boxes import last_boxed_only_string, remove_boxed
from slime_core.samples import Sample
from slime_rm.math.dapo import dapo


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, **_: Any
) -> dict[str, Any]:
    """Return `score` (1.0 or -1.0), `acc` and `pred`."""
    sample = Sample(index=0, response=solution_str, label=str(ground_truth))
    grade = dapo(sample, strict_box=strict_box_verify)
    return {"score": grade.score, "acc": bool(grade.parts["acc"]), "pred": grade.details["pred"]}


__all__ = ["compute_score", "last_boxed_only_string", "remove_boxed"]
_GRADE = "answers are compared as mathematics, not as normalised text; use compute_score"
__getattr__ = lacking(
    __name__,
    dict.fromkeys(
        ("normalize_final_answer", "is_correct_minerva", "is_correct_strict_box", "verify"), _GRADE
    ),
)
