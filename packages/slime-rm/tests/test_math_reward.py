r"""The reward `math`, on a table of answers judged by hand."""

import subprocess
import sys
import threading
import time

import pytest
from slime_core.errors import SampleError
from slime_core.sample import Sample
from slime_rm.math import math

RIGHT = [
    # label, answer
    ("4", "4"),
    ("4", " 4 "),
    ("4", "4."),
    ("4", "$4$"),
    ("4", r"\(4\)"),
    ("4", "+4"),
    ("4", "004"),
    ("4", r"\mathbf{4}"),
    (r"\boxed{4}", "4"),
    (r"so it is $\boxed{\frac12}$", "0.5"),
    # fractions, decimals, mixed numbers
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"\frac{1}{2}", r"\frac12"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", ".5"),
    (r"\frac{1}{2}", r"\frac{2}{4}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("1.5", r"1\frac{1}{2}"),
    (r"\frac{3}{2}", "1 1/2"),
    (r"\frac{1}{3}", "0.333333"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"\frac{7}{12}", r"0.58\overline{3}"),
    ("1.0", "1"),
    ("0", "-0"),
    # percent, money, units, degrees
    ("0.1", r"10\%"),
    ("10", r"10\%"),
    (r"10\%", "10%"),
    ("5", r"\$5"),
    ("5", r"5 \text{ cm}"),
    ("5", r"5\,\mathrm{cm}"),
    ("12", r"12\text{ inches}"),
    ("90", r"90^\circ"),
    # large numbers
    ("1000", "1,000"),
    ("1000", r"1,\!000"),
    ("150000", r"150\,000"),
    ("150000", "150 000"),
    ("150000", r"150{,}000"),
    ("1000000.5", "1,000,000.5"),
    ("1000", "1e3"),
    ("0.0015", "1.5e-3"),
    ("1000", r"1\times10^{3}"),
    ("1024", "2^{10}"),
    ("1267650600228229401496703205376", "2^{100}"),
    ("3628800", "10!"),
    ("10", r"\binom{5}{2}"),
    # roots, constants, functions
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\sqrt2+\sqrt3", r"\sqrt{5+2\sqrt6}"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt3}{2}"),
    (r"2\pi", r"2 \cdot \pi"),
    ("1", r"\sin^2 x + \cos^2 x"),
    ("2", "|-2|"),
    # expressions, equations
    ("x+1", "1+x"),
    ("x^2-1", "(x-1)(x+1)"),
    (r"\frac{1}{x}", "x^{-1}"),
    ("5", "x=5"),
    ("x=5", "5"),
    ("y=2x+1", "y = 1 + 2x"),
    ("3+4i", "4i+3"),
    # sets, tuples, intervals, matrices
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2,3", "3, 2, 1"),
    ("1,2,3", "1, 2 and 3"),
    ("(1,2)", r"\left( 1, 2 \right)"),
    ("(0,100)", "(0, 100)"),
    ("[0,1)", r"\left[0,1\right)"),
    (r"[-\frac12,\infty)", r"[-0.5, \infty)"),
    (r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)"),
    (r"\emptyset", r"\varnothing"),
    ("2,-2", r"\pm 2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    # words
    (r"\text{Evelyn}", "Evelyn"),
    ("B", r"\text{(B)}"),
    (r"\textbf{(B)}", "b"),
    ("yes", r"\text{Yes}"),
    (r"\text{no solution}", "No solution."),
    ("xyz", r"z \cdot y \cdot x"),
]
WRONG = [
    ("4", "5"),
    ("4", "44"),
    ("4", "-4"),
    ("4", ""),
    ("4", r"\text{four}"),
    ("4", "x"),
    ("4", "4!"),
    ("4", "4 or 5"),
    ("4", "1 2 3 4 5"),
    ("4", "the answer is 4"),
    ("4", r"\frac{4}{0}"),
    ("1", r"\frac{0}{0}"),
    (r"\frac{1}{3}", "0.33"),
    (r"\frac{1}{3}", "0.3"),
    (r"\frac{22}{7}", "3.14"),
    ("3.9", "3"),
    ("0.5", "0"),
    ("0.0000001", "0.0000002"),
    ("0.0000001", "0.0"),
    (r"1.6\times10^{-19}", "0"),
    ("0.0", r"10^{-9}"),
    ("1000", "1.000"),
    ("1234", "12,34"),
    ("100000000000000000001", "100000000000000000000"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("[0,1)", "[0,1]"),
    ("(0,100)", "0100"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("1,2,3", "1,2"),
    (r"\infty", r"-\infty"),
    ("x>3", r"x \ge 3"),
    ("x=5", "y=5"),
    ("x+1", "x+2"),
    (r"\frac{3}{4}", r"\frac{3}{4}x"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("cat", "act"),
    ("Evelyn", "nylevE"),
    ("B", "C"),
    (r"\text{(B)}", r"\text{(A)}"),
    ("yes", "no"),
    (r"\log 2", r"\ln 2"),
]
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
}


def score(response: str, label: str = "5") -> float:
    return math(Sample(index=17, response=response, label=label))


@pytest.mark.parametrize(("label", "answer"), RIGHT)
def test_right_answer_scores_one(label, answer):
    assert score(rf"Thus \boxed{{{answer}}}.", label) == 1.0


@pytest.mark.parametrize(("label", "answer"), WRONG)
def test_wrong_answer_scores_zero(label, answer):
    assert score(rf"Thus \boxed{{{answer}}}.", label) == 0.0


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answer_scores_zero_soon(name):
    score(r"\boxed{5.0}")  # imports sympy
    started = time.process_time()
    assert score(rf"\boxed{{{HOSTILE[name]}}}") == 0.0
    assert time.process_time() - started < 5


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
    code = "import sys, slime_rm.math, slime_rm.exact, slime_rm.chance; print('sympy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
