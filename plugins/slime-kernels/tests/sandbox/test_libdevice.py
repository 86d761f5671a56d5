"""Functions of libdevice for the interpreter, against values that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from slime_kernels.sandbox import libdevice
from triton import language as tl
from triton.runtime.interpreter import TensorHandle

#: Symbol, arguments, and what it gives for them.
KNOWN = [
    ("__nv_tanhf", [[0.5]], [math.tanh(0.5)]),
    ("__nv_erff", [[0.5]], [math.erf(0.5)]),
    ("__nv_roundf", [[0.5, -2.5, 1.2]], [1.0, -3.0, 1.0]),  # halves away from 0
    ("__nv_rintf", [[0.5, 1.5, -2.5]], [0.0, 2.0, -2.0]),  # halves to even
    ("__nv_remainderf", [[5.0, 5.0], [3.0, 2.0]], [-1.0, 1.0]),  # of the nearest multiple
    ("__nv_fmodf", [[-5.0], [3.0]], [-2.0]),
    ("__nv_tgammaf", [[5.0, -0.5, -1.5]], [24.0, -2 * math.sqrt(math.pi), 4 / 3 * math.sqrt(math.pi)]),
    ("__nv_cbrtf", [[-8.0]], [-2.0]),
    ("__nv_fast_powf", [[2.0], [10.0]], [1024.0]),
    ("__nv_fdiv_rn", [[1.0], [4.0]], [0.25]),
    ("__nv_saturatef", [[-1.0, 0.5, 2.0, math.nan]], [0.0, 0.5, 1.0, 0.0]),
    ("__nv_normcdff", [[0.0]], [0.5]),
]


def called(symbol, args):
    handles = [TensorHandle(np.array(one, dtype=np.float32), tl.float32) for one in args]
    return libdevice._elementwise("", "", symbol, handles, tl.float32, is_pure=True)


@pytest.mark.parametrize(("symbol", "args", "wanted"), KNOWN, ids=[symbol for symbol, *_ in KNOWN])
def test_a_function_gives_what_it_is_known_to_give(symbol, args, wanted):
    found = called(symbol, args)
    assert found.data.dtype == np.float32
    assert found.data.tolist() == pytest.approx(wanted, rel=1e-6)


def test_one_that_is_not_known_is_named():
    with pytest.raises(NotImplementedError, match="__nv_byte_perm"):
        called("__nv_byte_perm", [[1.0]])
