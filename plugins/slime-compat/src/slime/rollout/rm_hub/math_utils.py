"""Mathematics in boxes."""

from slime_compat.views.samples.boxes import last_boxed_only_string, remove_boxed
from slime_compat.views.samples.grading import score
from slime_rm.math.boxed import last_boxed


def extract_answer(passage: str) -> str | None:
    """Return what the last box of a text holds."""
    return last_boxed(passage)


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """Return whether the last box of a solution is the answer, which may be boxed itself."""
    return score("math", solution_str, last_boxed(str(ground_truth)) or ground_truth) == 1.0


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are the same mathematics."""
    return score("math", f"\\boxed{{{given_answer}}}", ground_truth) == 1.0


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are the same mathematics."""
    return grade_answer_sympy(given_answer, ground_truth)


extract_boxed_answer = extract_answer

__all__ = [
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "last_boxed_only_string",
    "remove_boxed",
]
