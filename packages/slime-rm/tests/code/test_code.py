"""The reward `code`: tests on standard input and on functions, and answers that would rather cheat."""

import json

import pytest
from slime_core.errors import SampleError
from slime_core.samples import Sample
from slime_rm.code.code import code

pytestmark = pytest.mark.timeout(120)
DOUBLE = {"inputs": ["2\n", "-5\n"], "outputs": ["4\n", "-10"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}


def graded(source, tests, **options):
    response = f"Like this:\n```python\n{source}\n```\nDone."
    return code(Sample(index=6, response=response, label=json.dumps(tests)), **options)


def test_a_program_that_passes_every_test_scores_one():
    grade = graded("print(2 * int(input()))   ", DOUBLE)
    assert (grade.score, grade.parts) == (1.0, {"share": 1.0})


def test_a_program_that_passes_some_tests_scores_zero_and_says_which_share():
    grade = graded("print(4)", DOUBLE)
    assert (grade.score, grade.parts) == (0.0, {"share": 0.5})
    assert grade.details["failures"] == ["test 1: wrong answer '4\\n'"]


def test_functions_and_methods_are_called():
    assert graded("def add(a, b):\n    print('noise')\n    return a + b", ADD).score == 1.0
    assert graded("class Solution:\n    def add(self, a, b):\n        return a + b", ADD).score == 1.0
    assert graded("def add(a, b):\n    return b", ADD).parts == {"share": 0.0}


def test_outputs_of_one_value_each_may_be_wrapped_in_lists():
    """As in APPS and TACO. Where one output is another list, all are what they say."""
    echo, listed = "def f(a):\n    return a", "def f(a):\n    return [a]"
    tests = {"fn_name": "f", "inputs": [["aba"], [3]], "outputs": [["aba"], [3]]}
    assert graded(echo, tests).score == graded(listed, tests).score == 1.0
    assert graded("def f(a):\n    return 3", tests).parts == {"share": 0.5}
    assert graded(echo, {"fn_name": "f", "inputs": [["a"], [1]], "outputs": [["a"], [1, 1]]}).score == 0.0
    assert (
        graded("def f():\n    return 1", {"fn_name": "f", "inputs": [[]], "outputs": [[1, 2]]}).score == 0.0
    )


def test_the_last_block_counts_and_no_block_scores_zero():
    response = "```python\nprint(1)\n```\nNo:\n```py\nprint(2 * int(input()))\n```"
    assert code(Sample(response=response, label=json.dumps(DOUBLE))).score == 1.0
    assert code(Sample(response="print(2 * int(input()))", label=json.dumps(DOUBLE))).score == 0.0


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise SystemExit(0)", "wrong answer ''"),
        ("import os; os._exit(0)", "wrong answer ''"),
        ("def add(a, b): raise ValueError('no')", "exit status 1"),
        ("def sub(a, b): return a", "exit status 1"),
        (
            "class Always:\n    def __eq__(self, other): return True\ndef add(a, b): return Always()",
            "exit status 1",
        ),
        ("import time\ndef add(a, b): time.sleep(100)", "out of time"),
        (
            "import sys\ndef add(a, b): sys._getframe(1).f_globals['answer'].write('3'); return 4",
            "wrong answer '34'",
        ),
        ("import os\ndef add(a, b): os.write(9, b'['); os._exit(0)", "exit status 1"),
        (
            "import sys\ndef add(a, b): sys._getframe(1).f_globals['answer'].write('[' * 100000)",
            "wrong answer '[[",
        ),
        (
            "import sys\ndef add(a, b): sys._getframe(1).f_globals['answer'].write('9' * 5000)",
            "wrong answer '999",
        ),
        ("def add(a, b): return '\\ud800'", "wrong answer"),
        ("def add(a, b): return 3  # \ud800", "exit status 1"),
        ("def add(a, b): return 3  # \0", "exit status 1"),
    ],
)
def test_a_program_cannot_pass_by_ending_early_or_lying(source, why):
    wall_s = 1.0 if why == "out of time" else 20.0
    grade = graded(source, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, wall_s=wall_s)
    assert grade.score == 0.0
    assert why in grade.details["failures"][0]


def test_only_the_first_tests_run_when_so_asked():
    assert graded("print(4)", DOUBLE, max_tests=1).score == 1.0


def test_a_program_that_never_ends_does_not_take_the_time_of_all_its_tests():
    tests = {"inputs": ["1\n"] * 60, "outputs": ["2"] * 60}
    grade = graded("while True: pass", tests, wall_s=1.0, total_s=2.0)
    assert (grade.score, grade.parts, grade.details["passed"]) == (0.0, {"share": 0.0}, 0)
    assert grade.details["failures"][0].startswith("test 0: out of time")
    assert (
        grade.details["failures"][4]
        == "test 4: not run: the tests before took the 2 s of all (total_s, max_tests)"
    )


@pytest.mark.parametrize(
    "label",
    [
        "print(1)",
        "[]",
        '{"inputs": [], "outputs": []}',
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": [[1]], "outputs": ["1"]}',
        "[" * 100_000,
        '{"inputs": ["\\ud800"], "outputs": ["1"]}',
        '{"fn_name": 3, "inputs": [[1]], "outputs": ["1"]}',
        '{"fn_name": "a b", "inputs": [[1]], "outputs": ["1"]}',
        '{"fn_name": "", "inputs": [[1]], "outputs": ["1"]}',
        '{"fn_name": "f(1)", "inputs": [[1]], "outputs": ["1"]}',
        '{"inputs": "ab", "outputs": "cd"}',
        '{"inputs": {"a": 1}, "outputs": {"a": 1}}',
        '{"inputs": ["1"], "outputs": [["1"]]}',
        '{"inputs": ["1"], "outputs": [null]}',
    ],
)
def test_a_label_that_is_no_tests_is_an_error_that_names_the_sample(label):
    with pytest.raises(SampleError, match=r"^sample 6: label is .* wanted tests as JSON"):
        code(Sample(index=6, response="```\nx\n```", label=label))
