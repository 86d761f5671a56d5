"""What the table of verdicts cannot say of options: why a response decides for none, and how long that takes."""

import time

import pytest
from slime_core.samples import Sample
from slime_rm.choice.decision import Decision, decide
from slime_rm.choice.gpqa import gpqa
from slime_rm.choice.multiple_choice import multiple_choice


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("Answer: A or B", "names several options: A, B"),
        ("The answer is not B.", "rejects B and decides for no option"),
        ("Answer: B. Wait, that is wrong.", "takes its decision back"),
        (r"So \boxed{42}", "its last box holds no option: '42'"),
        ("I have no idea.", "decides for no option"),
    ],
)
def test_a_response_without_a_decision_says_why(response, why):
    assert decide(response, "ABCD") == Decision(None, why)
    assert multiple_choice(Sample(response=response, label="B")).details == {"answer": None, "why": why}


def test_the_text_of_an_option_stands_for_its_letter():
    texts = {"A": "10 eV", "B": "20 eV"}
    assert decide("It is 20 eV, not 10 eV.", "AB", texts).letter == "B"
    assert decide("B. 10 eV", "AB", texts) == Decision(None, "names several options: A, B")


def test_gpqa_says_when_a_letter_cannot_be_compared_with_a_text():
    grade = gpqa(Sample(response="Answer: B", label="the mitochondrion"))
    assert (grade.score, grade.details["answer"]) == (0.0, "B")
    assert grade.details["why"].startswith("names a letter; without choices")


@pytest.mark.parametrize(
    "part",
    ["A ", "A. ", "A, ", "A\n", "not ", "answer is ", "(", r"\boxed{", "~~", "is not A but ", "because A "],
)
def test_hostile_responses_are_read_in_time(part):
    began = time.process_time()
    decide(part * 100_000, "ABCDEFGHIJ")
    assert time.process_time() - began < 5
