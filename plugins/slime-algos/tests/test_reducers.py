"""Reducers: by hand, and against explicit loops over random ragged batches."""

import functools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_algos.reducers import constant, sample_mean, sequence_sum, token_mean
from slime_core.protocols import ReductionView


def view_of(masks, rollout_ids) -> ReductionView:
    return ReductionView(
        loss_mask=np.array([m for mask in masks for m in mask], dtype=np.float64),
        response_lengths=np.array([len(mask) for mask in masks], dtype=np.int64),
        rollout_ids=np.array(rollout_ids, dtype=np.int64),
    )


def slow_sample_mean(masks, rollout_ids, values):
    executions = sorted(set(rollout_ids))
    total = 0.0
    for execution in executions:
        trained, loss = 0.0, 0.0
        for mask, rollout_id, row in zip(masks, rollout_ids, values, strict=True):
            if rollout_id == execution:
                trained += sum(mask)
                loss += sum(m * x for m, x in zip(mask, row, strict=True))
        total += loss / max(1.0, trained)
    return total / len(executions)


def slow_token_mean(masks, rollout_ids, values):
    loss = sum(m * x for mask, row in zip(masks, values, strict=True) for m, x in zip(mask, row, strict=True))
    return loss / sum(max(1.0, sum(mask)) for mask in masks)


def slow_sequence_sum(masks, rollout_ids, values):
    loss = sum(m * x for mask, row in zip(masks, values, strict=True) for m, x in zip(mask, row, strict=True))
    return loss / len(set(rollout_ids))


def slow_constant(masks, rollout_ids, values):
    return slow_sequence_sum(masks, rollout_ids, values) / 30


@functools.wraps(constant)
def constant_30(view):
    return constant(view, loss_scale_factor=30)


@st.composite
def ragged(draw):
    masks = draw(
        st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7), min_size=1, max_size=9)
    )
    ids = draw(st.lists(st.integers(-3, 10**12), min_size=len(masks), max_size=len(masks)))
    shared = draw(st.lists(st.integers(0, len(masks) - 1), min_size=len(masks), max_size=len(masks)))
    numbers = st.floats(-100, 100, allow_nan=False)
    values = [draw(st.lists(numbers, min_size=len(mask), max_size=len(mask))) for mask in masks]
    return masks, [ids[i] for i in shared], values


@pytest.mark.parametrize(
    ("reducer", "slow"),
    [
        (sample_mean, slow_sample_mean),
        (token_mean, slow_token_mean),
        (sequence_sum, slow_sequence_sum),
        (constant_30, slow_constant),
    ],
)
@given(case=ragged())
def test_weights_give_what_an_explicit_loop_gives(reducer, slow, case):
    masks, rollout_ids, values = case
    weights = reducer(view_of(masks, rollout_ids))
    flat = np.array([x for row in values for x in row])
    assert weights.dtype == np.float64
    assert float(weights @ flat) == pytest.approx(slow(masks, rollout_ids, values), rel=1e-9, abs=1e-9)


def test_sample_mean_of_two_samples_weighs_each_one_half():
    weights = sample_mean(view_of([[1, 1], [1, 0, 1, 1, 1]], [0, 1]))
    assert weights.tolist() == [1 / 4, 1 / 4, 1 / 8, 0, 1 / 8, 1 / 8, 1 / 8]


def test_sample_mean_weighs_an_execution_as_one_however_many_samples_it_has():
    weights = sample_mean(view_of([[1], [1, 1, 1], [1, 1]], [5, 5, 9]))
    assert weights.tolist() == [1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4]


def test_token_mean_weighs_every_trained_token_the_same():
    weights = token_mean(view_of([[1, 1], [1, 0, 1]], [0, 1]))
    assert weights.tolist() == [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4]


def test_fully_masked_sample_adds_nothing_and_counts():
    masks = [[1, 1], [0, 0, 0]]
    assert sample_mean(view_of(masks, [0, 1])).tolist() == [1 / 4, 1 / 4, 0, 0, 0]
    assert token_mean(view_of(masks, [0, 1])).tolist() == [1 / 3, 1 / 3, 0, 0, 0]


def test_reducers_import_no_torch():
    code = "import sys, slime_algos.reducers, slime_algos.hooks; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("reducer", "counted", "skipped"),
    [(sample_mean, [1 / 4, 1 / 4], [1 / 2, 1 / 2]), (token_mean, [1 / 3, 1 / 3], [1 / 2, 1 / 2]),
     (sequence_sum, [1 / 2, 1 / 2], [1, 1])],
)  # fmt: skip
def test_a_fully_masked_sample_counts_unless_it_is_skipped(reducer, counted, skipped):
    view = view_of([[1, 1], [0]], [0, 1])
    assert reducer(view).tolist() == pytest.approx([*counted, 0])
    assert reducer(view, skip_masked=True).tolist() == pytest.approx([*skipped, 0])


@pytest.mark.parametrize("reducer", [sample_mean, token_mean, sequence_sum])
def test_a_step_of_masked_samples_alone_weighs_nothing(reducer):
    assert reducer(view_of([[0], [0, 0]], [0, 1]), skip_masked=True).tolist() == [0, 0, 0]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_constant_that_nothing_can_be_divided_by_is_refused(factor):
    with pytest.raises(ValueError, match="constant: loss_scale_factor is"):
        constant(view_of([[1]], [0]), loss_scale_factor=factor)
