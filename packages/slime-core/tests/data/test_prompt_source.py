"""The order, indices and state of `PromptSource`."""

import hashlib
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_core.data.prompt_source import PromptSource
from slime_core.errors import CheckpointError, DataError
from slime_core.samples import Sample


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


def of_lengths(*lengths, **options):
    return PromptSource(
        [Sample(prompt="x", tokens=[1] * n, metadata={"row": n}) for n in lengths],
        **{"n_samples_per_prompt": 1, "max_prompt_len": 3, "place": "d:{}".format, **options},
    )


def test_prompts_that_are_too_long_are_passed_over_and_counted(caplog):
    source = of_lengths(1, 5, 3, 4)
    groups = source.take(5)
    assert rows(groups) == [1, 3, 1, 3, 1]
    assert [group[0].index for group in groups] == [0, 1, 2, 3, 4]
    assert "epoch 1, which ends with d:3: dropped 2 of 4 prompts for having more than 3 tokens" in caplog.text
    assert [place for place, _ in source.prompts()] == ["d:0", "d:2"]


def test_a_restored_source_passes_over_the_same_prompts():
    source, other = (of_lengths(1, 5, 3, 4, 2, shuffle=True) for _ in range(2))
    source.take(4)
    other.restore(json.loads(json.dumps(source.state())))
    assert rows(source.take(6)) == rows(other.take(6))


@pytest.mark.parametrize(("limit", "then"), [(3, [3, 1, 3, 1]), (4, [3, 4, 1, 3]), (None, [5, 3, 4, 1])])
def test_a_state_goes_on_under_another_limit(limit, then):
    """Of four prompts the first is taken; whether the second, of five tokens, comes next is said by the limit of now."""
    source, other = of_lengths(1, 5, 3, 4), of_lengths(1, 5, 3, 4, max_prompt_len=limit)
    source.take(1)
    other.restore(json.loads(json.dumps(source.state())))
    groups = other.take(4)
    assert rows(groups) == then
    assert [group[0].index for group in groups] == [1, 2, 3, 4]


def test_a_state_of_an_earlier_version_goes_on_under_its_limit_alone():
    """Its hash was of the prompts and, where there was one, the limit."""
    digest = hashlib.sha256()
    for n in (1, 5):
        digest.update(b"\1\0\0\0\0\0\0\0" * n + f'["x", null, {{"row": {n}}}]'.encode())
    without, _ = digest.hexdigest(), digest.update(b"at most 4 tokens")
    state = {"epoch": 0, "offset": 1, "group_index": 1, "index": 1, "length": 2, "further_content": None}
    of_lengths(1, 5, max_prompt_len=4).restore(state | {"content": digest.hexdigest()})
    with pytest.raises(
        CheckpointError, match=r"and its rollout_max_prompt_len, if an earlier version saved it"
    ):
        of_lengths(1, 5, max_prompt_len=3).restore(state | {"content": digest.hexdigest()})
    of_lengths(1, 5, max_prompt_len=3).restore(state | {"content": without})
    source = of_lengths(1, 5, max_prompt_len=4)
    source.restore(state | {"content": digest.hexdigest()})
    assert source.state()["content"] == without


def test_the_place_of_a_group_is_that_of_its_prompt():
    source = of_lengths(1, 5, 3, 4)
    source.take(3)
    assert [source.place_of(number) for number in range(4)] == ["d:0", "d:2", "d:0", None]


def test_places_are_known_of_the_newest_groups():
    source = of_lengths(1, 2)
    source.take(10_002)
    assert [source.place_of(number) for number in (0, 1, 2, 3, 10_001)] == [None, None, "d:0", "d:1", "d:1"]


def test_a_limit_that_drops_every_prompt_is_an_error():
    for use in (lambda source: source.take(1), lambda source: list(source.prompts())):
        with pytest.raises(DataError, match=r"all 2 prompts .* the shortest 4; raise the limit"):
            use(of_lengths(5, 4))


def test_a_limit_on_messages_that_are_not_rendered_is_an_error():
    with pytest.raises(DataError, match=r"d:1: .* set apply_chat_template"):
        list(of_lengths(1, 0).prompts())


def test_a_large_source_is_built_and_looked_at_in_part(caplog):
    built = []

    class Rows:
        def __len__(self):
            return 10**6

        def __getitem__(self, number):
            built.append(number)
            return Sample(prompt=str(number), tokens=[1])

    source = PromptSource(Rows(), n_samples_per_prompt=1, shuffle=True, seed=3, digest=lambda: "of the file")
    assert len(source) == 10**6
    assert len(list(source.prompts())) == 10_000
    assert built == list(range(10_000))
    built.clear()
    (group,) = source.take(1)
    draws = random.Random(3)
    keys = [draws.random() for _ in range(10**6)]
    assert built == [keys.index(min(keys))]
    assert group[0].prompt == str(built[0])
    other = PromptSource(Rows(), n_samples_per_prompt=1, shuffle=True, seed=3, digest=lambda: "of another")
    other.restore(source.state())
    assert "the rows beyond the first 10000 are not those that the run began with" in caplog.text
    assert other.take(1)[0][0].index == 1


def test_where_a_prompt_cannot_be_built_none_is_taken():
    class Rows(list):
        def __getitem__(self, number):
            if number == 2:
                raise DataError("row 3: broken")
            return super().__getitem__(number)

    source = PromptSource(Rows(Sample(prompt=str(n), tokens=[1]) for n in range(4)), n_samples_per_prompt=1)
    with pytest.raises(DataError, match="row 3: broken"):
        source.take(3)
    assert [group[0].prompt for group in source.take(2)] == ["0", "1"]
