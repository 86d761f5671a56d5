"""The reward `f1`."""

import pytest
from slime_core.samples import Sample
from slime_rm.text.f1 import f1


def test_f1_says_precision_and_recall():
    grade = f1(Sample(response="big red dog", label="red dog house roof"))
    assert grade.parts == {"precision": 2 / 3, "recall": 1 / 2}
    assert grade.score == pytest.approx(4 / 7)


def test_a_thought_is_no_part_of_the_answer():
    assert f1(Sample(response="<think>red or blue</think> big red dog", label="big red dog")).score == 1.0
    assert f1(Sample(response="<think>big red dog", label="big red dog")).score == 0.0
