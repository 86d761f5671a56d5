"""The group reward `majority`."""

from slime_core.samples import Sample
from slime_rm.math.majority import majority


def test_the_majority_is_right_however_it_is_written():
    responses = [r"\boxed{0.5}", r"\boxed{7}", r"\boxed{\frac12}", "no box", r"\boxed{1/2}"]
    grades = majority([Sample(response=response) for response in responses])
    assert [grade.score for grade in grades] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert {grade.parts["share"] for grade in grades} == {0.6}
    assert grades[3].details == {"answer": None, "majority": "0.5"}


def test_of_answers_given_equally_often_the_first_is_right():
    assert [g.score for g in majority([Sample(response=rf"\boxed{{{n}}}") for n in (3, 4)])] == [1.0, 0.0]


def test_a_group_without_answers_has_no_majority():
    assert [grade.score for grade in majority([Sample(response="?"), Sample(response="")])] == [0.0, 0.0]


def test_a_response_that_is_cut_off_in_its_thought_has_no_vote():
    responses = [r"<think>\boxed{2}", r"<think>\boxed{2}", r"<think>x</think>\boxed{3}"]
    grades = majority([Sample(index=i, response=response) for i, response in enumerate(responses)])
    assert [grade.score for grade in grades] == [0.0, 0.0, 1.0]
