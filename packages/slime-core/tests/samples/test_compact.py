"""`Compact`: a column behaves as the list of its numbers."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_core.data.make_batch import make_batch
from slime_core.errors import SampleError
from slime_core.rewards.transforms import raw
from slime_core.samples import Sample, Status
from slime_core.samples.compact import FLOAT32, FLOAT64, IDS, MASK, Compact, joined
from slime_core.testing.tabular import per_token

INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8)


@given(INTS, INTS, st.slices(8))
def test_it_adds_compares_and_slices_as_its_list(first, second, part):
    column = Compact(IDS, first)
    assert column == first and first == column
    assert (column != second) == (first != second)
    assert column + second == first + second and second + column == second + first
    assert column[part] == first[part] and isinstance(column[part], Compact)
    assert list(column) == first and bool(column) == bool(first)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda column: pickle.loads(pickle.dumps(column))]
)
def test_copies_are_compact_and_apart(copied):
    column = Compact(IDS, [1, 2])
    other = copied(column)
    other += [3]
    assert (type(other), other, column) == (Compact, [1, 2, 3], [1, 2])


def test_its_bytes_are_those_of_its_list():
    assert bytes(Compact(IDS, [104, 105])) == b"hi"  # what a tokenizer of bytes says
    with pytest.raises(ValueError, match="range"):
        bytes(Compact(IDS, [256]))


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(TypeError):
        Compact(IDS, [1.5])
    with pytest.raises(OverflowError):
        Compact(IDS, [2**31])
    with pytest.raises(OverflowError, match="an array of int64 has numbers that int32 cannot hold"):
        Compact(IDS, np.array([2**31]))
    with pytest.raises(OverflowError):
        Compact(IDS, np.array([1.5]))


def test_joined_columns_keep_every_bit():
    thirds = [1 / 3, 2 / 3]
    assert joined(Compact(FLOAT32, [0.5]), thirds, FLOAT32) == [0.5, *thirds]
    assert joined(Compact(FLOAT32, [0.5]), thirds, FLOAT32).typecode == FLOAT64
    assert joined([], Compact(FLOAT32, [0.5]), FLOAT32).typecode == FLOAT32
    assert joined([7], Compact(IDS, [8]), IDS).typecode == IDS
    assert type(joined([7], [8], IDS)) is list
    assert joined(Compact(IDS, [7]), ["x"], IDS) == [7, "x"]  # the sample's check says what is wrong


def finished(ids, log_probs, *, index=0) -> Sample:
    sample = Sample(index=index, group_index=0, tokens=[5, 6], reward=1.0)
    sample.append_response(ids, log_probs=log_probs, finish_reason="stop")
    return sample


@pytest.mark.parametrize(
    "as_column", [np.array, lambda values: Compact(FLOAT32 if values[0] < 0 else IDS, values)]
)
def test_a_response_of_arrays_equals_one_of_lists(as_column):
    sample, listed = finished(as_column([7, 8]), as_column([-0.5, -0.25])), finished([7, 8], [-0.5, -0.25])
    sample.check(vocab_size=9)
    assert isinstance(sample.tokens, Compact)
    assert sample == listed
    for one in (sample, listed):
        one.append_response([3], trainable=False)
    assert (sample, sample.loss_mask, sample.rollout_log_probs) == (listed, [1, 1, 0], [-0.5, -0.25, 0.0])


def test_checks_name_the_number_in_a_compact_column():
    with pytest.raises(
        SampleError, match=r"sample 0: tokens\[3\] is 9 \(int\); wanted ids, ints from 0 to 8"
    ):
        finished(Compact(IDS, [7, 9]), None).check(vocab_size=9)
    with pytest.raises(SampleError, match=r"sample 0: tokens\[2\] is -1"):
        finished(Compact(IDS, [-1, 9]), None).check()
    for bad in (float("nan"), float("-inf"), 0.5):
        with pytest.raises(SampleError, match=r"sample 0: rollout_log_probs\[1\] is "):
            finished(Compact(IDS, [7, 8]), Compact(FLOAT32, [-0.5, bad])).check()
    sample = finished(Compact(IDS, [7, 8]), None)
    sample.loss_mask = Compact(MASK, [1, 2])
    with pytest.raises(SampleError, match=r"sample 0: loss_mask\[1\] is 2"):
        sample.check()


def batch_of(samples):
    return make_batch(
        1,
        [samples],
        global_batch_size=len(samples),
        temperature=1.0,
        transform=lambda r, _: raw(r, _),
        reducer=per_token,
    )


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, False)])
def test_a_batch_of_compact_columns_is_that_of_lists(kinds):
    samples = []
    for index, is_compact in enumerate(kinds):
        ids, log_probs = [7, 8 + index], [-0.5, -1.0]
        compact = (Compact(IDS, ids), Compact(FLOAT32, log_probs))
        samples.append(finished(*(compact if is_compact else (ids, log_probs)), index=index))
    samples[1].loss_mask = Compact(MASK, [0, 1]) if kinds[1] else [0, 1]
    batch = batch_of(samples)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 5, 6, 7, 9]
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs.tolist() == [-0.5, -1.0, -0.5, -1.0]
    assert batch.loss_mask.tolist() == [1, 1, 0, 1]
    assert (batch.tokens.dtype, batch.rollout_log_probs.dtype) == (np.int32, np.float32)
    assert batch.tokens.flags.writeable


@pytest.mark.parametrize(
    ("ids", "log_probs", "what"),
    [([7, -8], [-1.0, -1.0], r"tokens\[3\]"), ([7, 8], [-1.0, float("nan")], r"rollout_log_probs\[1\]")],
)
def test_a_batch_names_the_sample_whose_compact_column_is_wrong(ids, log_probs, what):
    good = finished(Compact(IDS, [7, 8]), Compact(FLOAT32, [-1.0, -1.0]))
    bad = finished(Compact(IDS, ids), Compact(FLOAT32, log_probs), index=1)
    assert bad.status is Status.COMPLETED
    with pytest.raises(SampleError, match=f"sample 1: {what}"):
        batch_of([good, bad])


def test_a_log_prob_beyond_32_bits_is_named():
    with pytest.raises(
        SampleError, match="sample 0: rollout_log_probs of response token 1 is -inf; wanted a finite number"
    ):
        batch_of([finished([7, 8], [-1.0, -1e300])])
