"""The buffer's order, and the losslessness of its state."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from slime_core.data.buffers import FifoBuffer, from_json, to_json
from slime_core.errors import CheckpointError, SampleError
from slime_core.samples import Sample, Status
from slime_core.samples.compact import FLOAT32, IDS, MASK, Compact


def through_text(state):
    """What a checkpoint does to a state."""
    return json.loads(json.dumps(state, allow_nan=False))


def same(a, b):
    """Equality of nested values, arrays by dtype and bytes, NaN equal to itself."""
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


arrays = npst.arrays(
    st.sampled_from(["int32", "float32", "float16", "uint8", "bool", "<U3", ">i2", "complex64"]),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.builds(np.float32, st.floats(width=32)),
)
keys = st.text() | st.sampled_from(["__ndarray__", "__tuple__", "__items__", "__float__"])
values = st.recursive(
    scalars | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.integers() | st.tuples(st.integers()), inner, max_size=2),
    ),
    max_leaves=8,
)
samples = st.builds(
    Sample,
    index=st.none() | st.integers(0),
    prompt=st.text() | st.just([{"role": "user", "content": "hi"}]),
    tokens=st.lists(st.integers(0, 200_000), max_size=5),
    rollout_log_probs=st.none() | st.lists(st.floats(), max_size=5),
    rollout_routed_experts=st.none() | arrays,
    status=st.sampled_from(Status),
    reward=st.none() | st.floats() | st.dictionaries(st.text(), st.floats(), max_size=2),
    metadata=st.dictionaries(st.text(), values, max_size=3),
)


@given(values)
def test_any_value_survives_json(value):
    assert same(from_json(through_text(to_json(value))), value)


@given(st.lists(st.lists(samples, min_size=1, max_size=3), max_size=3))
def test_restore_of_state_is_the_same_buffer(groups):
    buffer, copy = FifoBuffer(), FifoBuffer()
    buffer.put(groups)
    copy.put([[Sample(index=-1)]])
    copy.restore(through_text(buffer.state()))
    assert len(copy) == len(groups)
    restored = copy.take(len(groups))
    assert same([[s.to_dict() for s in g] for g in restored], [[s.to_dict() for s in g] for g in groups])
    assert all(type(sample.status) is Status for group in restored for sample in group)


def test_groups_leave_in_the_order_they_came():
    buffer = FifoBuffer()
    buffer.put([[Sample(index=0)], [Sample(index=1)]])
    buffer.put([[Sample(index=2)]])
    assert [group[0].index for group in buffer.take(2)] == [0, 1]
    assert len(buffer) == 1
    assert [group[0].index for group in buffer.take(5)] == [2]
    assert buffer.take(1) == []


def test_a_restored_array_can_be_written_to():
    array = from_json(through_text(to_json(np.arange(3, dtype=np.int32))))
    array[0] = 7
    assert array.tolist() == [7, 1, 2]


def test_state_does_not_change_with_the_buffer():
    buffer = FifoBuffer()
    buffer.put([[Sample(index=0, tokens=[1])]])
    state = buffer.state()
    buffer.take(1)[0][0].tokens.append(2)
    assert state["groups"][0][0]["tokens"] == [1]


@pytest.mark.parametrize("typecode, values", [(IDS, [3, 1, 2]), (FLOAT32, [0.1, -math.inf]), (MASK, [])])
def test_compact_columns_come_back_as_they_are(typecode, values):
    column = Compact(typecode, values)
    back = from_json(json.loads(json.dumps(to_json({"column": column}))))["column"]
    assert type(back) is Compact and (back.typecode, back.tobytes()) == (typecode, column.tobytes())


def test_a_snapshot_is_of_its_moment_whatever_becomes_of_the_samples():
    buffer = FifoBuffer()
    compact = Sample(index=1, prompt="b", tokens=Compact(IDS, [1, 2]))
    buffer.put([[Sample(index=0, prompt="a", tokens=[1])], [compact]])
    state, snapshot = buffer.state(), buffer.snapshot()
    (first,), (second,) = buffer.take(2)
    for sample in (first, second):
        sample.append_response(
            [5, 6], log_probs=[-1.0, -2.0], text="xy", finish_reason="length", weight_version="1"
        )
        sample.metadata["later"] = True
    buffer.put([[Sample(index=2, prompt="c")]])
    assert json.dumps(snapshot()) == json.dumps(state)


def test_a_value_without_json_form_names_sample_and_field():
    buffer = FifoBuffer()
    buffer.put([[Sample(index=4, metadata={"when": {1, 2}})]])
    with pytest.raises(CheckpointError, match=r"sample 4: metadata holds builtins.set '\{1, 2\}'"):
        buffer.state()


def test_an_empty_group_is_refused():
    buffer = FifoBuffer()
    with pytest.raises(SampleError, match="group 1 of 2 is empty"):
        buffer.put([[Sample()], []])
    assert len(buffer) == 0
