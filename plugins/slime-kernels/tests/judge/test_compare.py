"""Comparison of answers from their bytes, against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from slime_kernels.judge.compare import difference


def tensor(dtype, shape, buffer=0):
    return {"dtype": dtype, "shape": shape, "buffer": buffer}


def compare(ours, theirs, dtype="float32"):
    form = tensor(dtype, [len(ours)])
    return difference(form, form, [np.array(ours, dtype).tobytes()], [np.array(theirs, dtype).tobytes()])


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0 + 9e-5], [1.0], True),
        ([1.0 + 2e-4], [1.0], False),
        ([np.nan], [1.0], False),
        ([1.0], [np.nan], False),
        ([np.nan], [np.nan], True),
        ([np.inf], [np.inf], True),
        ([-np.inf], [np.inf], False),
        ([3e38], [np.inf], False),
        ([], [], True),
    ],
)
def test_numbers_are_compared_to_a_tolerance_and_nan_is_only_nan(ours, theirs, same):
    assert (compare(ours, theirs) is None) == same


def test_bfloat16_is_compared_by_its_values():
    one, close, far = (
        np.array([value], np.uint16).tobytes() for value in (0x3F80, 0x3F81, 0x4000)
    )  # 1, 1.0078, 2
    form = tensor("bfloat16", [1])
    assert difference(form, form, [close], [one]) is None
    assert difference(form, form, [far], [one]) is not None


def test_whole_numbers_are_compared_exactly():
    assert compare([1, 2], [1, 2], "int64") is None
    assert compare([1, 3], [1, 2], "int64") is not None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (tensor("float32", [4]), "shape [4]; wanted [2]"),
        (tensor("float16", [2]), "dtype float16; wanted float32"),
        ({"tuple": [tensor("float32", [2]), tensor("float32", [2])]}, "2 results; wanted 1"),
        ({"value": 1.0}, "another value than a tensor"),
    ],
)
def test_what_is_of_another_form_differs(found, said):
    content = np.zeros(2, np.float32).tobytes()
    assert said in str(difference(found, tensor("float32", [2]), [content], [content]))
