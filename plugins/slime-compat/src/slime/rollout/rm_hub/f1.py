"""Token F1."""

from slime_compat.views.samples.grading import graded


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """Return (F1, precision, recall) of words."""
    told = graded("f1", prediction, ground_truth)
    return float(told["score"]), float(told["precision"]), float(told["recall"])


__all__ = ["f1_score"]
