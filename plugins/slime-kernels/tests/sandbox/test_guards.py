"""Tensors between guards: they are what they were, and what is written beside them is found."""

from __future__ import annotations

import ctypes

import pytest
import torch
from slime_kernels.sandbox.guards import Guards
from slime_kernels.sandbox.launch_memory import BoundsError

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    ),
    *(torch.bool, torch.complex64, torch.complex128),
]


def elements(tensor, first, n):
    """Return elements of the memory that a tensor begins, which may lie outside of it."""
    size = tensor.element_size()
    raw = (ctypes.c_char * (n * size)).from_address(tensor.data_ptr() + first * size)
    return torch.frombuffer(raw, dtype=tensor.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_what_it_was_and_a_byte_beside_it_is_found(dtype):
    given = torch.arange(6).to(dtype).reshape(2, 3)
    for at in (-1, 6, 20, -(1 << 18) // dtype.itemsize):
        guards = Guards("cpu")
        placed = guards.placed(given)
        assert torch.equal(placed.view(torch.uint8), given.view(torch.uint8))
        assert (placed.dtype, placed.storage_offset(), placed._base) == (dtype, 0, None)
        assert placed.data_ptr() % 64 == 0
        guards.check()
        (ctypes.c_ubyte * 1).from_address(placed.data_ptr() + at * dtype.itemsize)[0] ^= 1
        with pytest.raises(BoundsError, match="wrote outside its tensors: beside 1 of the 1"):
            guards.check()


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.is_floating_point])
def test_what_is_read_beside_a_tensor_is_nan_and_what_no_maximum_or_minimum_leaves_out(dtype):
    placed = Guards("cpu").placed(torch.zeros(5, dtype=dtype))
    for first in (5, -4):
        nan, most, other, least = elements(placed, first, 4).double().tolist()
        assert nan != nan and other != other
        assert most == -least > 0.4 * torch.finfo(dtype).max


def test_no_copy_of_a_guard_passes_for_another():
    for dtype in (torch.float16, torch.float32, torch.int8, torch.bool, torch.int64):
        guards = Guards("cpu")
        x, y = (guards.placed(torch.zeros(5, dtype=dtype)) for _ in range(2))
        ctypes.memmove(y.data_ptr(), x.data_ptr(), 6 * x.element_size())
        with pytest.raises(BoundsError):
            guards.check()


def test_strides_and_shared_memory_stay():
    whole = torch.arange(24.0)
    for view in (whole.view(4, 6).t(), whole[3:9], whole.as_strided((3, 2), (1, 4), 5), whole[:1].expand(7)):
        placed = Guards("cpu").placed(view)
        assert torch.equal(placed, view)
        assert (placed.stride(), placed.storage_offset()) == (view.stride(), view.storage_offset())
    guards, module = Guards("cpu"), torch.nn.Module()
    module.inner, module.table = torch.nn.Linear(4, 6), {"rows": [whole[:6], whole[6:]]}
    module.tied, module.kept = module.inner.weight, whole.view(4, 6)
    module.register_buffer("buffer", torch.ones(3))
    before = {name: one.clone() for name, one in module.state_dict().items()}
    was = module.inner.weight
    guards.place_weights(module)
    assert module.tied is module.inner.weight is was
    assert was.requires_grad
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    module.kept[0, 0] = 77
    assert module.table["rows"][0][0] == 77
    guards.check()
    (ctypes.c_float * 1).from_address(module.buffer.data_ptr() + 12)[0] = 1
    with pytest.raises(BoundsError, match="beside 1 of the 4"):
        guards.check()


def test_what_is_no_tensor_of_the_device_stays_and_what_is_gone_is_forgotten():
    guards, value = Guards("cpu"), [torch.ones(2), (torch.ones(0), 3, None)]
    placed = guards.placed(value)
    assert (type(placed), type(placed[1]), placed[1][1:]) == (list, tuple, (3, None))
    assert guards.placed(value[1][0]) is value[1][0]
    assert Guards("cuda").placed(value[0]) is value[0]
    assert len(guards._blocks) == 1
    del placed
    guards.check()
    assert guards._blocks == []
