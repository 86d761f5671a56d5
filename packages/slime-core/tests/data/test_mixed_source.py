"""Mixtures of data sets: their proportions at every prompt, ids, epochs, and state."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_core.data.mixed_source import MixedSource, named_files, next_of
from slime_core.data.prompt_source import PromptSource
from slime_core.errors import CheckpointError, DataError
from slime_core.samples import Sample
from slime_core.testing import contracts


def one(name, n, **options):
    prompts = [Sample(prompt=f"{name}{i}", metadata={"source_name": name}) for i in range(n)]
    return PromptSource(prompts, **{"n_samples_per_prompt": 2, **options})


def mixture(sizes, weights, **options):
    sources = {name: one(name, n, **options) for name, n in sizes.items()}
    return MixedSource(sources, weights, n_samples_per_prompt=2)


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_it_keeps_the_contract_of_sources():
    create = lambda: mixture({"a": 3, "b": 5}, {"a": 1, "b": 2.5}, shuffle=True)  # noqa: E731  # called thrice
    contracts.check_source(create, n_samples_per_prompt=2)


def test_three_to_one_by_hand():
    source = mixture({"a": 2, "b": 9}, {"a": 3, "b": 1})
    assert prompts(source.take(8)) == ["a0", "a1", "b0", "a0", "a1", "a0", "b1", "a1"]
    assert source.epochs == {"a": 3, "b": 0}


def test_ids_rise_over_all_sources():
    groups = mixture({"a": 2, "b": 2}, {"a": 1, "b": 1}).take(3)
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert [[sample.group_index for sample in group] for group in groups] == [[0, 0], [1, 1], [2, 2]]


def test_the_place_of_a_group_is_that_of_its_prompt_in_its_source():
    source = mixture({"a": 2, "b": 9}, {"a": 3, "b": 1}, place="row {}".format)
    source.take(4)
    assert [source.place_of(number) for number in range(5)] == ["row 0", "row 1", "row 0", "row 0", None]


@settings(max_examples=60)
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=7))
def test_every_prefix_has_every_share_within_the_bound_of_the_theorem(weights):
    names = [str(i) for i in range(len(weights))]
    total = sum(map(Fraction, weights))
    shares = {name: Fraction(weight) / total for name, weight in zip(names, weights, strict=True)}
    taken, bound = dict.fromkeys(names, 0), 1 - Fraction(1, 2 * len(weights) - 2)
    for turn in range(1, 120):
        taken[next_of(shares, taken)] += 1
        assert all(abs(share * turn - taken[name]) <= bound for name, share in shares.items())


@settings(max_examples=30)
@given(cut=st.integers(0, 25), shuffle=st.booleans())
def test_a_restored_mixture_goes_on_where_it_was(cut, shuffle):
    def create():
        return mixture({"a": 3, "b": 4, "c": 1}, {"a": 2, "b": 1.7, "c": 0.4}, shuffle=shuffle, seed=3)

    whole, begun, resumed = create().take(cut + 20), create(), create()
    first = begun.take(cut)
    resumed.restore(json.loads(json.dumps(begun.state())))
    assert first + resumed.take(20) == whole


def test_a_state_of_other_weights_is_refused():
    state = mixture({"a": 2, "b": 2}, {"a": 1, "b": 3}).state()
    with pytest.raises(CheckpointError, match=r"taken of a mixture .*'a': '1/4'.* this one is .*'a': '1/2'"):
        mixture({"a": 2, "b": 2}, {"a": 1, "b": 1}).restore(state)


def test_an_epoch_ends_when_the_source_that_takes_longest_was_seen_once():
    assert len(mixture({"a": 6, "b": 5}, {"a": 3, "b": 1})) == 20
    assert len(mixture({"a": 60, "b": 5}, {"a": 3, "b": 1})) == 80


@pytest.mark.parametrize("words", [["a", "a.jsonl", "b"], ["a", "a.jsonl", "a", "b.jsonl"]])
def test_names_without_a_file_and_names_twice_are_refused(words):
    with pytest.raises(DataError, match="wanted one file, or names and files in turn"):
        named_files(words)


def test_files_in_another_order_or_another_number_of_samples_are_not_the_mixture_of_the_run():
    state = mixture({"a": 2, "b": 2}, {"a": 1, "b": 1}).state()
    with pytest.raises(CheckpointError, match=r"in the order \['a', 'b'\]"):
        mixture({"b": 2, "a": 2}, {"a": 1, "b": 1}).restore(state)
    fewer = MixedSource({"a": one("a", 2), "b": one("b", 2)}, {"a": 1, "b": 1}, n_samples_per_prompt=1)
    with pytest.raises(CheckpointError, match="taken with 2 samples a prompt, found 1"):
        fewer.restore(state)
    with pytest.raises(CheckpointError, match="not taken over a mixture"):
        mixture({"a": 2, "b": 2}, {"a": 1, "b": 1}).restore(one("a", 2).state())
