"""The order of the buffer `priority`, by hand."""

import json

import pytest
from slime_core.data.priority_buffer import PriorityBuffer
from slime_core.errors import SampleError
from slime_core.samples import Sample


def group(index, *, priority=None, versions=()):
    metadata = {} if priority is None else {"priority": priority}
    return [Sample(index=index, metadata=metadata, weight_versions=list(versions))]


def taken(buffer, n):
    return [group[0].index for group in buffer.take(n)]


def filled():
    buffer = PriorityBuffer()
    buffer.put([group(0), group(1, versions=["7"]), group(2, priority=1.5)])
    buffer.put(
        [group(3, versions=["2", "9"]), group(4, priority=-1), group(5, versions=["2"]), group(6, priority=0)]
    )
    return buffer


def test_the_highest_priority_is_first_then_the_oldest_weights_then_what_was_put_first():
    assert taken(filled(), 10) == [2, 3, 5, 1, 0, 6, 4]


def test_what_is_left_keeps_its_order_also_when_it_is_restored():
    buffer, other = filled(), PriorityBuffer()
    assert taken(buffer, 3) == [2, 3, 5]
    other.restore(json.loads(json.dumps(buffer.state())))
    for each in (buffer, other):
        assert len(each) == 4
        assert taken(each, 2) == [1, 0]
        each.put([group(7, priority=9)])
        assert taken(each, 9) == [7, 6, 4]


@pytest.mark.parametrize("value", ["high", True, float("nan"), 10**400])
def test_a_priority_that_is_no_number_is_refused(value):
    buffer = PriorityBuffer()
    with pytest.raises(SampleError, match="sample 3: metadata 'priority' is"):
        buffer.put([group(2), group(3, priority=value)])
    assert len(buffer) == 0
