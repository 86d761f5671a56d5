"""Buckets of weights survive the way through Ray bit for bit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from slime_ray.trainer.buckets import pack, unpack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_tensor_comes_back_with_its_bits_shape_and_dtype(dtype, shape):
    tensor = (
        torch.arange(max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
    )
    ((name, found),) = unpack(pickle.loads(pickle.dumps(pack([("w", tensor)]))))
    assert name == "w"
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_part_of_a_larger_tensor_brings_no_more_than_its_own_bytes():
    part = torch.zeros(1000, 1000)[:2, :10]
    (packed,) = pack([("w", part)])
    assert packed[3].nbytes == 2 * 10 * 4
    assert len(pickle.dumps(packed)) < 1000


def test_array_of_a_trainer_without_tensors_comes_back_in_memory_of_its_own():
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    ((_, found),) = unpack(pack([("table", array)]))
    assert np.array_equal(found, array)
    assert found.flags.writeable
