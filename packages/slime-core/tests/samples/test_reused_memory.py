"""`ReusedMemory`: the memory of an array serves another one when nothing of the first is left, and not before."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from slime_core.samples.reused_memory import ReusedMemory

#: Numbers of 4 bytes in an array that is large enough to be kept.
LARGE = 1 << 20


def address(array):
    return array.__array_interface__["data"][0]


@pytest.fixture
def memory():
    return ReusedMemory()


def test_the_memory_of_an_array_that_is_gone_serves_the_next(memory):
    first = memory.empty(LARGE, np.int32)
    before = address(first)
    del first
    second = memory.empty(LARGE - 5, np.float32)
    assert (address(second), second.dtype, second.shape) == (before, np.float32, (LARGE - 5,))


@pytest.mark.parametrize(
    "kept",
    [
        lambda array: array,
        lambda array: array[5:7],
        lambda array: array[5:7].view(np.int8)[1:],
        lambda array: memoryview(array)[3:4],
        lambda array: {"in": [array.reshape(2, -1)]},
        lambda array: np.asarray(memoryview(array)),
        lambda array: np.frombuffer(array.data, dtype=np.uint8),
    ],
)
def test_what_is_kept_of_an_array_stays_as_it_is(memory, kept):
    array = memory.empty(LARGE, np.int32)
    array.fill(7)
    before, held = address(array), kept(array)
    del array
    gc.collect()
    other = memory.empty(LARGE, np.int32)
    other.fill(9)
    assert address(other) != before
    del held
    gc.collect()
    assert address(memory.empty(LARGE, np.int32)) == before


def test_arrays_at_the_same_time_share_nothing(memory):
    arrays = [memory.empty(LARGE, np.int32) for _ in range(3)]
    for number, array in enumerate(arrays):
        array.fill(number)
    assert [(int(array.min()), int(array.max())) for array in arrays] == [(0, 0), (1, 1), (2, 2)]


def test_memory_that_fits_no_longer_is_let_go_of(memory):
    for n in (LARGE, 2 * LARGE, 4 * LARGE, 16 * LARGE):
        memory.empty(n, np.int32)
    assert sum(len(block) for block in memory._blocks) == 16 * LARGE * 4 * 9 // 8
    memory.empty(LARGE, np.int32)  # a sixteenth of it
    assert sum(len(block) for block in memory._blocks) == LARGE * 4 * 9 // 8


def test_small_arrays_are_not_kept(memory):
    assert memory.empty(0, np.int32).shape == (0,)
    assert memory.empty(8, np.int64).shape == (8,)
    assert not memory._blocks
