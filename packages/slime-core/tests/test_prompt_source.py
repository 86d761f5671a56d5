"""The order, indices and state of `PromptSource`."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_core.errors import CheckpointError, DataError
from slime_core.sample import Sample
from slime_core.sources.prompt_source import PromptSource


def prototypes(n):
    return [Sample(prompt=f"prompt {i}", tokens=[i, i + 1], metadata={"row": i}) for i in range(n)]


def source(n=4, **options):
    return PromptSource(prototypes(n), **{"n_samples_per_prompt": 2, **options})


def rows(groups):
    return [group[0].metadata["row"] for group in groups]


def test_groups_follow_the_data_with_rising_ids():
    groups = source().take(3)
    assert rows(groups) == [0, 1, 2]
    assert [[s.group_index for s in group] for group in groups] == [[0, 0], [1, 1], [2, 2]]
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]


def test_one_request_may_span_several_epochs():
    taken = source(n=3)
    groups = taken.take(8)
    assert rows(groups) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [g[0].group_index for g in groups] == list(range(8))
    assert taken.epoch == 2


def test_samples_are_deep_copies():
    taken = source(n=1)
    first, second = taken.take(1)[0]
    first.metadata["row"] = "changed"
    first.tokens.append(7)
    assert second.metadata == {"row": 0}
    assert taken.take(1)[0][0].tokens == [0, 1]


def test_shuffle_depends_on_seed_plus_epoch_only():
    taken = source(n=20, shuffle=True, seed=5)
    epochs = [rows(taken.take(20)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert rows(source(n=20, shuffle=True, seed=7).take(20)) == epochs[2]


def test_shuffled_order_is_the_argsort_of_python_random_draws():
    import random

    draws = random.Random(11)
    keys = [draws.random() for _ in range(6)]
    expected = [row for _, row in sorted(zip(keys, range(6), strict=True))]
    assert rows(source(n=6, shuffle=True, seed=11).take(6)) == expected


@settings(deadline=None)
@given(
    n=st.integers(1, 7),
    requests=st.lists(st.integers(0, 10), max_size=6),
    shuffle=st.booleans(),
    cut=st.integers(0, 30),
)
def test_requests_partition_one_stream_and_restore_goes_on(n, requests, shuffle, cut):
    one = source(n=n, shuffle=shuffle, seed=3).take(sum(requests) + cut)
    cut_up = source(n=n, shuffle=shuffle, seed=3)
    groups = [group for request in requests for group in cut_up.take(request)]
    resumed = source(n=n, shuffle=shuffle, seed=3)
    resumed.restore(json.loads(json.dumps(cut_up.state())))
    assert groups + resumed.take(cut) == one


def test_state_of_a_data_set_of_another_length_is_refused():
    with pytest.raises(CheckpointError, match="taken over 5 prompts, this data set has 4"):
        source(n=4).restore(source(n=5).state())


def test_state_of_other_content_is_refused():
    other = prototypes(4)
    other[2].tokens = [9, 9]
    with pytest.raises(CheckpointError, match="hash"):
        source(n=4).restore(PromptSource(other, n_samples_per_prompt=2).state())


def test_no_prompt_is_an_error():
    with pytest.raises(DataError, match="no prompt"):
        source(n=0)


def test_a_negative_request_is_an_error():
    with pytest.raises(ValueError, match="n_groups is -1"):
        source().take(-1)
