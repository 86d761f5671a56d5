"""`pack_micro_batches`: a partition of the samples within a token limit."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_megatron.batch.bin_packing import _first_fit, pack_micro_batches


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_every_sample_is_in_one_micro_batch_and_no_limit_is_broken(lengths, max_tokens):
    batches = pack_micro_batches(lengths, max_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= max_tokens


def test_first_fit_decreasing_finds_the_two_full_micro_batches():
    # 7 + 3 = 10 and 6 + 4 = 10; in the order given, first fit alone would need three.
    assert pack_micro_batches([4, 3, 6, 7], 10) == [[0, 2], [1, 3]]


def test_tokens_are_spread_evenly():
    # First-fit-decreasing would fill one micro-batch with 9 and leave 3 to the other.
    assert pack_micro_batches([3, 3, 3, 3], 9) == [[0, 2], [1, 3]]


def test_spreading_never_costs_the_limit():
    # 5 + 5 and 4 + 3 + 3 fit 10; the even spread puts 5 + 4 and 5 + 3 first and the last 3 nowhere.
    batches = pack_micro_batches([5, 5, 4, 3, 3], 10)
    assert batches == [[0, 1], [2, 3, 4]]


def test_oversize_sample_is_alone_and_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        assert pack_micro_batches([2, 12, 3], 10) == [[0, 2], [1]]
    assert "1 of 3 samples are longer than max_tokens_per_gpu, 10 (the longest has 12 tokens)" in caplog.text


def test_no_samples_give_no_micro_batches():
    assert pack_micro_batches([], 10) == []


def test_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="max_tokens is 0"):
        pack_micro_batches([1], 0)


@pytest.mark.parametrize(
    ("lengths", "multiple_of", "wanted"),
    [
        ([3, 3, 3, 3], 1, [[0, 2], [1, 3]]),
        ([3, 3, 3, 3], 3, [[0, 3], [1], [2]]),
        ([3, 3, 3, 3], 4, [[0], [1], [2], [3]]),
        ([3, 3, 3, 3], 8, [[0], [1], [2], [3]]),
    ],
)
def test_micro_batches_are_a_multiple_as_far_as_there_are_samples(
    lengths: list[int], multiple_of: int, wanted: list[list[int]]
) -> None:
    assert pack_micro_batches(lengths, 9, multiple_of=multiple_of) == wanted


def test_a_long_sample_counts_for_the_multiple() -> None:
    assert pack_micro_batches([20, 2, 2, 2], 9, multiple_of=2) == [[0], [1, 2, 3]]
    assert len(pack_micro_batches([20, 20, 20, 2, 2], 9, multiple_of=3)) == 5


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 90))
def test_the_first_micro_batch_with_room_gets_the_sample(lengths: list[int], max_tokens: int) -> None:
    """As by looking at one after the other."""
    batches: list[list[int]] = []
    for i, length in enumerate(lengths):
        fits = (b for b in batches if sum(lengths[k] for k in b) + length <= max_tokens)
        found = next(fits, None)
        batches.append([i]) if found is None else found.append(i)
    assert _first_fit(range(len(lengths)), lengths, max_tokens) == batches
