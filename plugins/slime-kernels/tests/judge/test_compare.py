"""Comparison of answers from their bytes, against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from slime_kernels.judge.compare import difference, same_at_places


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


@pytest.mark.parametrize("block", [16, 32, 64])
def test_a_float32_matrix_product_in_another_order_is_the_same_in_400_trials(block):
    drawn, differ = np.random.default_rng(0), 0
    for trial in range(400):
        a, b = (
            drawn.standard_normal(shape, np.float32) * (1 + trial % 2 / 2) for shape in ((7, 2500), (2500, 7))
        )
        wanted, found = np.float32(a) @ np.float32(b), np.zeros((7, 7), np.float32)
        for k in range(0, 2500, block):
            found += np.float32(a[:, k : k + block]) @ np.float32(b[k : k + block])
        differ += compare(found.ravel(), wanted.ravel()) is not None
    assert differ == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        # the median of what is not 0 is 1, so 1.1e-4 may be missing
        ([1e-4, 0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0], True),
        ([2e-4, 0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0], False),
        # one large number makes the others no less exact: 1e-4 of 0.01, and 1e-5
        ([0.0101, 0.01, 1e6], [0.01, 0.01, 1e6], False),
        ([0.01, 0.01, np.inf], [0.01, 0.01, np.inf], True),
        ([1e-3, 0.0], [0.0, 0.0], False),
    ],
)
def test_a_small_number_is_as_exact_as_those_of_a_typical_size(ours, theirs, same):
    assert (compare(ours, theirs) is None) == same


def test_a_product_rounded_to_half_precision_is_not_the_same():
    drawn = np.random.default_rng(0)
    a, b = (drawn.standard_normal(shape, np.float32) for shape in ((7, 2500), (2500, 7)))
    assert compare((a @ b).astype(np.float16).ravel(), (a @ b).ravel()) is not None
    rounded = a.astype(np.float16).astype(np.float32) @ b.astype(np.float16).astype(np.float32)
    assert compare(rounded.ravel(), (a @ b).ravel()) is not None


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


def at_places(ours, theirs, dtype="float32"):
    forms = ({"shape": [9999], "dtype": f"torch.{dtype}", "numbers": list(each)} for each in (ours, theirs))
    return same_at_places(*([form] for form in forms))


@pytest.mark.parametrize(
    ("ours", "theirs", "dtype", "same"),
    [
        # 1e-4, and what sums of 2^20 numbers need, 2.1e-4, beside 1e-5
        ([1.0 + 3.1e-4], [1.0], "float32", True),
        ([1.0 + 3.3e-4], [1.0], "float32", False),
        # of the median, where a number is smaller
        ([3.1e-4, 1.0, 1.0], [0.0, 1.0, 1.0], "float32", True),
        ([3.3e-4, 1.0, 1.0], [0.0, 1.0, 1.0], "float32", False),
        ([1.009], [1.0], "float16", True),
        ([1.012], [1.0], "float16", False),
        ([1.0 + 2e-6], [1.0], "float64", False),
        ([3.0], [3.0], "int64", True),
        ([1001.0], [1000.0], "int64", False),
        ([np.nan, np.inf], [np.nan, np.inf], "float32", True),
        ([1.0], [np.nan], "float32", False),
    ],
)
def test_numbers_at_full_size_have_the_tolerance_of_trials_and_what_longer_sums_need(
    ours, theirs, dtype, same
):
    assert (at_places(ours, theirs, dtype) is None) == same


def tf32(numbers):
    """Float32 with a mantissa of 10 bits, as tensor cores take them."""
    return ((numbers.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def test_a_large_matrix_product_by_tf32_or_float16_is_refused_and_in_another_order_it_is_not():
    drawn = np.random.default_rng(0)
    a, b = (drawn.standard_normal(shape, np.float32) for shape in ((16, 4096), (4096, 16)))
    wanted, one_by_one = (a @ b).ravel(), np.zeros((16, 16), np.float32)
    for k in range(4096):
        one_by_one += np.outer(a[:, k], b[k])
    assert at_places(one_by_one.ravel(), wanted) is None
    for rounded in (tf32, lambda one: one.astype(np.float16).astype(np.float32)):
        found = (rounded(a) @ rounded(b)).ravel()
        assert "of 256 numbers are not those of Model" in str(at_places(found, wanted))


def test_a_sum_of_a_million_numbers_one_after_the_other_is_the_same():
    numbers = np.random.default_rng(0).standard_normal((8, 1 << 20), np.float32)
    in_order = np.cumsum(numbers, axis=1, dtype=np.float32)[:, -1]
    assert at_places(in_order, numbers.sum(axis=1, dtype=np.float64)) is None
