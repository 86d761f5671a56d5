"""What the table of verdicts cannot say of options: why a response decides for none, and how long that takes."""

import time

import pytest
from slime_core.sample import Sample
from slime_rm.choice import Decision, decide
from slime_rm.ending import without_special_tokens
from slime_rm.fences import python_block
from slime_rm.gpqa import gpqa
from slime_rm.multiple_choice import multiple_choice
from slime_rm.outputs import same_text, same_value


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


@pytest.mark.parametrize(
    "token",
    [
        "<|im_end|>",
        "<|endoftext|>",
        "<|END_OF_TURN_TOKEN|>",
        "<｜end▁of▁sentence｜>",
        "</s>",
        "<eos>",
        "<end_of_turn>",
        "<turn|>",
        "[PAD]",
    ],
)
def test_special_tokens_at_the_end_go_and_others_stay(token):
    assert without_special_tokens(f"a {token} b{token}\n{token} ") == f"a {token} b"


@pytest.mark.parametrize("text", ["<b>a</b>", "<s>a</s>", "a < b > c", "|a|", "x <y>", ""])
def test_what_is_no_special_token_stays(text):
    assert without_special_tokens(text) == text


def test_a_program_is_found_in_long_runs_of_fences():
    began = time.process_time()
    for text in ("`" * 300_000 + "x`", "~`" * 200_000, "``` " * 100_000, "```python\n" + "`" * 300_000 + "x"):
        python_block(text)
    assert time.process_time() - began < 5


def test_decimals_are_compared_to_a_tolerance_and_whole_numbers_exactly():
    assert same_value([0.1 + 0.2, {"a": 1 / 3}], [0.3, {"a": 0.333333}])
    assert not same_value(3.0000001, 3)
    assert not same_value(10**400, 1.5)
    assert not same_value(float("nan"), 0.5)
    assert same_text("0.30000000000000004 3\n", "0.3 3")
    assert not same_text("0.3 3.0", "0.3 3")
    assert not same_text("0.3", "0.3\n0.3")
