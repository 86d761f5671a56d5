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
        ("Many would answer B.", "decides for no option"),
        ("<think>The answer is B.", "was cut off while it thought: its thought never ends"),
        ("<think>C</think>B, or <think>D", "was cut off while it thought: its thought never ends"),
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


@pytest.mark.parametrize("count", [20, 60, 250, 5_000])
@pytest.mark.parametrize(
    ("before", "part", "after"),
    [
        ("B is", " really", " big."),
        ("B", " really", ""),
        ("B", " also,", " x"),
        ("B", ", clearly ,", " is"),
        ("", "answer is the ", "x B"),
        ("", "if we had would be ", ", B"),
        ("if ", "would be ", "," + " A" * 400),
        ("", "not think wrong ", ", B"),
        ("B is", " but", " B"),
        ("B", " looks right", " B"),
        ("", "students say ", ", B"),
        ("", "the answer of the other ", "B"),
        ("", "10% sure that ", ", B"),
        ("", "for the answer would ", "; B"),
        ("", "to (A) you if has ", "B."),
        ("", "\ufdfa A ", "B"),
        ("B", "</s>", ""),
    ],
)
def test_words_said_over_and_over_are_read_in_time(before, part, after, count):
    response = before + part * count + after
    began = time.process_time()
    multiple_choice(Sample(response=response, label="B"))
    multiple_choice(Sample(response=response[-1990:], label="B"))
    gpqa(Sample(response=response, label="B", metadata={"choices": ["really", "also clearly", "if we"]}))
    assert time.process_time() - began < 5
