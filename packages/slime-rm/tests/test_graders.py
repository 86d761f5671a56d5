"""What the table of verdicts cannot say: errors, limits, threads, details."""

import threading
import time

import pytest
from slime_core.errors import SampleError
from slime_core.sample import Sample
from slime_rm.answers import compare
from slime_rm.boxed_forms import boxed_f1, boxed_gpqa
from slime_rm.dapo import dapo
from slime_rm.deepscaler import deepscaler
from slime_rm.f1 import f1
from slime_rm.gpqa import gpqa
from slime_rm.gsm8k import gsm8k
from slime_rm.limit import LimitExceeded, cpu_limit
from slime_rm.math_verify import math_verify
from slime_rm.multiple_choice import multiple_choice


@pytest.mark.parametrize(
    "grader", [dapo, deepscaler, f1, gsm8k, math_verify, multiple_choice, boxed_f1], ids=lambda g: g.__name__
)
@pytest.mark.parametrize("label", [None, "", "  "])
def test_missing_label_is_an_error_that_names_the_sample(grader, label):
    with pytest.raises(SampleError, match=r"^sample 4: label is "):
        grader(Sample(index=4, response="", label=label))


@pytest.mark.parametrize(
    ("grader", "label", "words"),
    [
        (gsm8k, "seventy", "wanted a number"),
        (gsm8k, "1,00", "wanted a number"),
        (multiple_choice, "AB", "wanted the letter of an option, one of ABCDEFGHIJ"),
        (multiple_choice, "Z", "wanted the letter of an option, one of ABCDEFGHIJ"),
        (math_verify, "???", "wanted mathematics"),
        (gpqa, None, "neither correct_letter nor correct_answer"),
        (boxed_gpqa, "", "neither correct_letter nor correct_answer"),
    ],
)
def test_label_of_another_kind_is_an_error_that_names_the_sample(grader, label, words):
    with pytest.raises(SampleError, match=rf"^sample 4: .*{words}"):
        grader(Sample(index=4, response="Answer: 5", label=label))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"choices": "ABCD"}, r"metadata\['choices'\] is 'ABCD'; wanted a list"),
        ({"choices": ["x", "y"], "correct_letter": "C"}, "the correct letter is 'C'; wanted one of AB"),
        ({"valid_letters": ["1", "2"]}, "wanted letters"),
    ],
)
def test_gpqa_refuses_metadata_that_cannot_be(metadata, words):
    with pytest.raises(SampleError, match=f"^sample 4: .*{words}"):
        gpqa(Sample(index=4, response="A", label="A", metadata=metadata))


def test_unknown_method_of_gsm8k_is_an_error():
    with pytest.raises(ValueError, match="method is 'strcit'"):
        gsm8k(Sample(response="", label="1"), method="strcit")


def test_gsm8k_gives_the_format_score_to_a_wrong_number_in_the_right_form():
    grades = [gsm8k(Sample(response=r, label="72"), format_score=0.1) for r in ("#### 72", "#### 71", "71")]
    assert [(grade.score, dict(grade.parts).get("acc")) for grade in grades] == [
        (1.0, 1.0),
        (0.1, 0.0),
        (0.0, None),
    ]


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


def test_deepscaler_can_require_a_thought():
    sample = Sample(response=r"\boxed{5}", label="5")
    assert deepscaler(sample).score == 1.0
    assert deepscaler(sample, require_thought=True).score == 0.0


def test_f1_says_precision_and_recall():
    grade = f1(Sample(response="big red dog", label="red dog house roof"))
    assert grade.parts == {"precision": 2 / 3, "recall": 1 / 2}
    assert grade.score == pytest.approx(4 / 7)


def test_details_say_what_was_found_and_why():
    assert compare("4", "2+2") == "same meaning"
    assert compare("4", "4.") == "same writing"
    assert compare("Evelyn", r"\text{evelyn}") == "same words"
    assert compare("4", "5") == "different"
    assert compare("4", " ") == "empty"
    grade = deepscaler(Sample(response=r"\boxed{2+2}", label="4"))
    assert grade.details == {"answer": "2+2", "why": "same meaning"}


def test_math_verify_grades_in_a_thread():
    scores = []
    thread = threading.Thread(
        target=lambda: scores.extend(
            math_verify(Sample(response=response, label=r"\frac{1}{2}")).score
            for response in ("$0.5$", "$0.6$")
        )
    )
    thread.start()
    thread.join()
    assert scores == [1.0, 0.0]


def test_math_verify_reads_the_end_of_the_response_only():
    assert math_verify(Sample(response="$5$" + " " * 3000, label="5")).score == 0.0


def test_a_block_is_stopped_at_its_limit_even_when_it_swallows_exceptions():
    began = time.process_time()
    with pytest.raises(LimitExceeded), cpu_limit(0.1):
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue
    assert time.process_time() - began < 2


def test_a_block_within_its_limit_leaves_no_timer():
    with cpu_limit(0.05):
        pass
    began = time.process_time()
    while time.process_time() - began < 0.15:
        pass
