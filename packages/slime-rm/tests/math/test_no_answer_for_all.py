"""No answer is the same as labels that are not the same as each other: one that were would be right everywhere."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from slime_rm.math.same_answer import SAME, compare

LABELS = (
    "5", r"\frac{5}{9}", "x=3", r"25\%", "2x+1", "3:4", "1:0:3", "1,2", "(1,2)", "y=2x", "x>3", r"x\equiv 2 \pmod 5", r"[0,\infty)",
    r"\begin{pmatrix}1\\2\end{pmatrix}", "B", "7:30", r"x\ne 0", "101_2", r"\sqrt{2}", "i",
)  # fmt: skip
#: What is in proportion to anything, or equal to itself whatever it is times.
PARTS = ("0", r"\infty", "0x", r"10^{-90}\sqrt{2}", "x")
FORMS = (
    "{0}:{1}", "{0}:{1}:{0}", "({0}:{1},{0}:{1})", "{0}:{1},{1}:{0}", "x={0}:{1}", "{0}={1}", r"{0}\le {1}", "{0}(x-y)={1}", r"{0}\cdot({1})",
    r"{0}\equiv {1}\pmod 1", r"{1}\equiv 1\pmod {{{0}}}", r"\frac{{{0}}}{{{1}}}", "[{0},{1}]", r"x\in({0},{1})",
)  # fmt: skip


def test_labels_are_different():
    assert [pair for pair in combinations(LABELS, 2) if compare(*pair) in SAME] == []


@pytest.mark.parametrize("form", FORMS)
def test_no_answer_is_the_same_as_two_of_them(form):
    answers = [form.format(*parts) for parts in product(PARTS, repeat=2)]
    found = {answer: [label for label in LABELS if compare(label, answer) in SAME] for answer in answers}
    assert {answer: labels for answer, labels in found.items() if len(labels) > 1} == {}
