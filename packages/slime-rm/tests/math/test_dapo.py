"""The reward `dapo`."""

from slime_core.samples import Sample
from slime_rm.math.dapo import dapo


def test_dapo_says_accuracy_and_prediction():
    grade = dapo(Sample(response="Answer: $7$", label="8"))
    assert (grade.score, grade.parts, grade.details["pred"]) == (-1.0, {"acc": 0.0}, "$7$")


def test_strict_dapo_wants_the_very_writing_in_a_box_at_the_end():
    def strict(response, label="1/2"):
        return dapo(Sample(response=response, label=label), strict_box=True).score

    assert strict(r"so \boxed{1/2}") == 1.0
    assert strict(r"so \boxed{0.5}") == -1.0
    assert strict("Answer: 1/2") == -1.0
    assert strict(r"\boxed{1/2}" + "." * 100) == -1.0
