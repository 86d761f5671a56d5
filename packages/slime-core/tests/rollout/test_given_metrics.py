"""Metrics that user code hands over: what is a number, and how another value is told."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from slime_core.errors import PluginError
from slime_core.rollout.given_metrics import given_metrics


class Scalar:
    """As torch's: not a number by its class, and made one by `float`."""

    def __float__(self):
        return 0.5


class Unable:
    def __float__(self):
        raise RuntimeError("a tensor of two elements")

    def __str__(self):
        return "tensor([1., 2.])"


def test_numbers_of_any_library_are_floats():
    given = {
        "of python": 3, "true": True, "half": Fraction(1, 2), "numpy": np.float32(0.25), "array": np.array(2.0),
        "of numpy": np.int64(7), "torch": Scalar(), "infinite": math.inf,
    }  # fmt: skip
    found = given_metrics(given, who="f")
    assert found == {
        "of python": 3.0, "true": 1.0, "half": 0.5, "numpy": 0.25, "array": 2.0, "of numpy": 7.0, "torch": 0.5,
        "infinite": math.inf,
    }  # fmt: skip
    assert {type(value) for value in found.values()} == {float}
    assert math.isnan(given_metrics({"a": math.nan}, who="f")["a"])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1.0, 2.0], "list '[1.0, 2.0]'"),
        ("0.5", "str '0.5'"),
        (b"1", "bytes \"b'1'\""),
        (None, "NoneType 'None'"),
        (1j, "complex '1j'"),
        (np.zeros(2), "ndarray '[0. 0.]'"),
        (10**400, "int '1000"),
        (Unable(), "Unable 'tensor([1., 2.])'"),
    ],
)
def test_what_is_no_number_is_refused_with_its_name_and_whose_it_is(value, told):
    with pytest.raises(PluginError) as caught:
        given_metrics({"fine": 1.0, "mine/x": value}, who="the function f")
    message = str(caught.value)
    assert message.startswith(f"the function f: found the metric 'mine/x' as {told}")
    assert message.endswith("; wanted a number")


@pytest.mark.parametrize("name", ["step", 3])
def test_a_name_that_a_row_cannot_have_is_refused(name):
    with pytest.raises(PluginError, match=f"f: found a metric of the name {name!r}; wanted text other than"):
        given_metrics({name: 1.0}, who="f")


def test_what_is_no_dict_is_refused():
    with pytest.raises(PluginError, match=r"f: found list '\[1\]'; wanted a dict, metrics by their names"):
        given_metrics([1], who="f")
