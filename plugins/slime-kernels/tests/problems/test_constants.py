"""The numbers by which problems are made small, as KernelBench writes them; and what of a module is known without its memory."""

from __future__ import annotations

import pytest
from slime_core.data.rows.record import Record
from slime_core.errors import DataError
from slime_kernels.problems.constants import whole_numbers
from slime_kernels.problems.problem import problem_of
from slime_kernels.sandbox.problem_jobs import facts, load

from ..kernel_corpus import IMPORTS

SOURCE = """
batch_size = 32768
input_shape = (4096 * 8, batch_size)
height, (width, depth) = 256, (2 ** 8, 16)
size: int = 1000
half = size // 2
eps = 1e-5
flags = [True, 9, *input_shape]
"""


def of(forward, inputs, constants):
    model = f"class Model(nn.Module):\n    def forward(self, *x):\n        return {forward}\n"
    given = f"def get_inputs():\n    return [{', '.join(inputs)}]\ndef get_init_inputs():\n    return []\n"
    return IMPORTS + constants + model + given


def test_whole_numbers_are_those_of_expressions_tuples_and_targets_by_hand():
    assert whole_numbers(SOURCE) == {
        "batch_size": 32768,
        "input_shape[0]": 32768,
        "height": 256,
        "width": 256,
        "depth": 16,
        "size": 1000,
    }


def test_what_is_computed_from_others_follows_them():
    names = load(SOURCE, {"input_shape[0]": 3, "batch_size": 4, "width": 5, "size": 6})
    assert (names["input_shape"], names["height"], names["width"]) == ((3, 4), 256, 5)
    assert (names["half"], names["flags"]) == (3, [True, 9, 3, 4])
    assert load(SOURCE, {"half": 7})["half"] == 7


@pytest.mark.parametrize("expression", ["9 ** 9 ** 9", "1 // 0", "-1 * x", "'a' * 9", "2 ** -1"])
def test_what_is_no_number_or_too_large_a_one_is_not_computed(expression):
    assert whole_numbers(f"n = {expression}\n") == {}


@pytest.mark.parametrize(
    ("problem", "first"),
    [
        (
            of(
                "x[0] @ x[1]",
                ["torch.rand(M, K)", "torch.rand(K, N)"],
                "M = 1024 * 2\nK = 4096 * 2\nN = 64\n",
            ),
            {"M": 33, "K": 33, "N": 33},
        ),
        (
            of("(x[0] ** 2).mean()", ["torch.rand(n, *shape)"], "n = 32768\nshape = (32768,)\n"),
            {"n": 33, "shape[0]": 33},
        ),
        # 33, 32 of each would be 157 and 134 MB, and 20 of each 13 MB, and as much again of the answer; 16 of each 4 MB
        (
            of("x[0] + 1", ["torch.rand(a, b, c, d, e)"], "a, b, c = 64, 64, 64\nd, e = 64, 64\n"),
            dict.fromkeys("abcde", 16),
        ),
    ],
)
def test_problems_as_kernelbench_writes_them_are_made_small(problem, first):
    found, _ = facts({"code": problem, "shapes": []}, [])
    assert found["shapes"][0] == first


def test_inputs_that_cannot_be_drawn_without_memory_are_known_all_the_same():
    drawn = "torch.distributions.Pareto(0.01, 1.5).sample((n, 8))"
    read = "torch.rand(n) * torch.rand(n).max().item()"
    found, _ = facts({"code": of("x[0] * 2", [drawn, read], "n = 1024\n"), "shapes": [{"n": 2}]}, [])
    assert [one["shape"] for one in found["inputs"]["list"]] == [[1024, 8], [1024]]
    # 1024 x 8 and 1024 numbers in, 1024 x 8 out, 4 bytes each
    assert found["least_bytes"] == 4 * (2 * 8192 + 1024)


def test_a_shape_that_names_what_the_module_does_not_assign_is_refused():
    row = {"level": 1, "problem_id": 1, "name": "p", "code": of("x[0]", ["torch.rand(n)"], "n = 9 * 9\n")}
    assert problem_of(Record("rows.jsonl:1", row | {"shapes": [{"n": 3}]})).shapes == ({"n": 3},)
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: found m in 'shapes', which the module does not assign"
    ):
        problem_of(Record("rows.jsonl:1", row | {"shapes": [{"n": 3, "m": 4}]}))
