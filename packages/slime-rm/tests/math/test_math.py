"""The reward `math`: where it looks, what it refuses, and that nothing holds it up. Verdicts are in `verdicts.jsonl`."""

import subprocess
import sys
import threading
import time
from random import Random

import pytest
from slime_core.errors import SampleError
from slime_core.samples import Sample
from slime_rm.math.math import math

#: Answers that would keep sympy busy for minutes, or fill the memory; none of them is 5.
HOSTILE = {
    "tower": r"9^{9^{9^{9}}}",
    "power of ten": r"10^{10^{10}}",
    "tiny": r"10^{-10^{10}}",
    "root of a tower": r"\sqrt{10^{10^{10}}}",
    "factorial": r"(10^{10})!",
    "factorials": "10!!!!",
    "binomial": r"\binom{10^{10}}{10^{9}}",
    "sine of a tower": r"\sin(10^{10^{10}})",
    "inside a set": r"\{1, 9^{9^{9}}\}",
    "inside a matrix": r"\begin{pmatrix}1\\9^{9^{9^{9}}}\end{pmatrix}",
    "equation": r"x=9^{9^{9^{9}}}",
    "power of a sum": r"(x+1)^{100000}",
    "power of a sum in a product": r"2(x+y+1)^{1000}",
    "sum": r"\sum_{k=1}^{1000000} \frac{1}{k}",
    "product": r"\prod_{k=1}^{10^7} k",
    "integral": r"\int_0^1 e^{x^2} \sin(x^3) dx",
    "digits": "9" * 100_000,
    "braces": "{" * 2000 + "5" + "}" * 2000,
    "brackets": "(" * 200 + "5" + ")" * 200,
    "roots": r"\sqrt{" * 200 + "2" + "}" * 200,
    "unclosed": r"\frac{" * 500,
    "long sum": "1+" * 3000 + "1",
    "long list": "1," * 3000,
    "repeating": r"0.\overline{" + "3" * 3000 + "}",
    "scientific": "1e999999999",
    "backslashes": "\\" * 999,
    "null": "5\0",
    "root of a large number": r"\sqrt{10^{4000}+1}",
    "factorial of a factorial": "(x!)!",
    "power of powers": "x^{x^{x^{x}}}",
    "many roots": r"\sqrt" * 60 + "2",
    "many sines": r"\sin " * 80 + "x",
    "many bars": "|" * 400,
    "many signs": r"\pm 5" * 60,
    "many equations": "x=4" + "=5" * 150,
    "many unions": r"[0,1]\cup" * 40 + "[2,3]",
    "sum of many letters to a power": "(a+b+c+d+f+g+h+k)^{64}",
    "set of formulas": r"\{" + ",".join(rf"\sqrt{{{n}}}" for n in range(2, 40)) + r"\}",
}


def score(response: str, label: str = "5") -> float:
    return math(Sample(index=17, response=response, label=label)).score


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answer_scores_zero_soon(name):
    score(r"\boxed{5.0}")  # imports sympy
    started = time.process_time()
    assert score(rf"\boxed{{{HOSTILE[name]}}}") == 0.0
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("label", "answer", "why"),
    [
        ("5", r"5\text{ is wrong}", "refused: `is wrong` behind the number is no known unit"),
        ("5", r"\text{not } 5", "refused: the text `not` before a number is not understood"),
        ("5", r"5\oplus 1", r"refused: `\oplus` is not understood"),
        ("5", r"9^{9^{9^9}}", "refused: it is too large to be worked out"),
        ("5", r"\frac{5}{0}", "refused: it has no value"),
        ("5", "(5", "refused: `(` never closes"),
        (r"\{1,2\}", "(1,2)", "different: the label is a set, the answer a tuple or interval (...)"),
        (r"\text{June 20}", "June 21", "different; of the label only its own writing is accepted"),
    ],
)
def test_refusal_has_its_reason(label, answer, why):
    grade = math(Sample(index=17, response=rf"\boxed{{{answer}}}", label=label))
    assert grade.score == 0.0
    assert grade.details["why"].startswith(why)


def test_words_in_any_order_of_signs_raise_nothing():
    signs = [
        r"\frac",
        r"\sqrt",
        r"\text{or}",
        r"\pm",
        r"\cup",
        r"\over",
        r"\choose",
        r"\le",
        r"\pmod",
        r"\infty",
        "^",
        "_",
        "|",
    ]
    signs += [
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        r"\{",
        r"\}",
        ",",
        ":",
        "=",
        "+",
        "-",
        "/",
        "!",
        "%",
        "$",
        "5",
        "0",
        "x",
        "i",
        "cm",
    ]
    random = Random(7)
    for _ in range(2000):
        answer = " ".join(random.choices(signs, k=random.randint(1, 9)))
        why = math(Sample(index=17, response=rf"\boxed{{{answer}}}", label="[0,5]")).details["why"]
        assert why is not None and "sympy failed" not in why, answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        "5",
        "Answer: 5",
        r"\boxed",
        r"\boxed{",
        r"\boxed{5",
        r"\boxed{}",
        r"\boxed{ }",
        r"\boxed{5}\boxed{",
        "boxed{5}",
    ],
)
def test_response_without_a_closed_box_scores_zero(response):
    assert score(response) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{4} no, \boxed{5}",
        r"\boxed{\boxed{5}}",
        r"\fbox{5}",
        r"$\boxed 5$",
        r"\boxed {5}",
        "\\boxed{\n5\n}",
    ],
)
def test_last_box_counts_however_it_is_drawn(response):
    assert score(response) == 1.0


def test_right_answer_before_a_wrong_one_scores_zero():
    assert score(r"\boxed{5} or rather \boxed{6}") == 0.0


def test_long_answer_written_as_the_label_scores_one():
    proof = "x + " * 500 + "1"
    assert score(rf"\boxed{{{proof}}}", proof.replace(" ", "")) == 1.0


@pytest.mark.parametrize("label", [None, "", "  "])
def test_missing_label_is_an_error_that_names_the_sample(label):
    with pytest.raises(SampleError, match="sample 17: label is"):
        math(Sample(index=17, response=r"\boxed{5}", label=label))


def test_label_that_is_too_large_to_work_out_is_matched_by_its_own_writing():
    assert score(r"\boxed{9^{9^{9^9}}}", "9^{9^{9^9}}") == 1.0


def test_grades_in_a_thread():
    results = []
    thread = threading.Thread(
        target=lambda: results.append((score(r"\boxed{\frac{10}{2}}"), score(r"\boxed{x+1}", "1+x")))
    )
    thread.start()
    thread.join()
    assert results == [(1.0, 1.0)]


def test_importing_the_reward_does_not_import_sympy():
    code = "import sys, slime_rm.math.math, slime_rm.text.exact, slime_rm.text.random_score; print('sympy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
