"""Values between processes: what has no memory is an error of its own."""

from __future__ import annotations

import pytest
from slime_kernels.sandbox.values import InputsError, decode


def test_inputs_that_there_is_no_memory_for_are_named_by_type_and_shape():
    assert list(decode({"dtype": "float32", "shape": [2, 3], "buffer": "shape"}, []).shape) == [2, 3]
    with pytest.raises(
        InputsError, match=r"no memory for .* at its own size, float32 of shape \[1099511627776, 64\]"
    ):
        decode({"list": [{"dtype": "float32", "shape": [1 << 40, 64], "buffer": "shape"}]}, [])
