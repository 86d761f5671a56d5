"""Which samples share which tokens: turns, forks and prompts, as trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_megatron.batch.trees.sharing import token_trees
from slime_megatron.batch.trees.token_tree import TokenTree

from ..batches import make_batch
from ..comparison import conversations


def batch_of(*samples, group_ids=None):
    """Return a batch of samples given by their ids, each with a prompt of one token."""
    batch = make_batch(lengths=tuple((1, len(ids) - 1) for ids in samples))
    groups = np.zeros(len(samples), dtype=np.int64) if group_ids is None else np.array(group_ids)
    return replace(batch, tokens=np.concatenate(samples).astype(np.int32), group_ids=groups)


def trees_of(batch, *, max_tokens=1000, **given):
    return token_trees(batch, range(len(batch)), max_tokens=max_tokens, share=True, **given)


def test_turns_and_forks_of_a_conversation_are_one_tree():
    """All but the last tokens are forwarded: 31, 69, 54, 63 and 34. What the first turn says is said in the three after it."""
    conversation, prompt, alone = trees_of(conversations())
    assert conversation == TokenTree(
        lengths=(69, 63, 54, 31, 34),
        shared=(0, 58, 40, 31, 20),
        prompts=(10, 45, 38, 10, 25),
        members=(1, 3, 2, 0, 4),
    )
    assert conversation.n_tokens == 69 + 5 + 14 + 0 + 14
    assert prompt == TokenTree((14, 9), (0, 6), (6, 6), (5, 6))
    assert alone == TokenTree((7,), (0,), (5,), (7,))


def test_equal_samples_are_forwarded_once():
    (tree,) = trees_of(batch_of([1, 2, 3], [1, 2, 3], [1, 2, 9]))  # the last ids are not forwarded
    assert (tree.lengths, tree.shared, tree.members) == ((2, 2, 2), (0, 2, 2), (0, 1, 2))


def test_responses_that_begin_alike_by_chance_do_not_part_twice():
    """After a prompt of 4, two of three responses have 15 tokens in common; 16 would pay."""
    prompt, end = [1, 2, 3, 4], [0] * 3
    for common, shared in ((15, (0, 4, 4)), (16, (0, 20, 4))):
        words = list(range(10, 10 + common))
        (tree,) = trees_of(
            batch_of([*prompt, *words, 5, *end], [*prompt, *words, 6, *end], [*prompt, 7, *end])
        )
        assert (tree.members, tree.shared) == ((0, 1, 2), shared)


def test_what_ends_within_another_is_free_however_short():
    (tree,) = trees_of(batch_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [1, 7, 7]))
    assert (tree.members, tree.lengths, tree.shared) == ((0, 1, 2), (5, 3, 2), (0, 3, 1))


def test_groups_share_nothing_with_each_other():
    trees = trees_of(batch_of([1, 2, 3], [1, 2, 3], group_ids=[4, 5]))
    assert [tree.members for tree in trees] == [(0,), (1,)]


def test_a_large_tree_is_split_and_repeats_what_its_parts_share():
    (first, second) = trees_of(batch_of([1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 8, 9]), max_tokens=5)
    assert (first.members, first.shared, first.n_tokens) == ((0, 1), (0, 3), 5)
    assert (second.members, second.shared, second.n_tokens) == ((2,), (0,), 4)


def test_tokens_are_shared_as_far_as_they_are_routed_alike():
    batch = batch_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 6])
    routes = [np.zeros((5, 2, 1), dtype=np.int16) for _ in range(2)]
    assert trees_of(batch, routes=routes)[0].shared == (0, 4)
    routes[1][2, 1] = 3
    assert trees_of(batch, routes=routes)[0].shared == (0, 2)
    routes[1][0, 0] = 3
    assert [tree.members for tree in trees_of(batch, routes=routes)] == [(0,), (1,)]


@settings(max_examples=200)
@given(
    samples=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=40), min_size=1, max_size=12),
    max_tokens=st.integers(1, 60),
    at_least=st.integers(1, 5),
    data=st.data(),
)
def test_every_sample_is_once_on_a_path_of_its_own_ids(samples, max_tokens, at_least, data):
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(samples), max_size=len(samples)))
    batch = batch_of(*samples, group_ids=groups)
    trees = trees_of(batch, max_tokens=max_tokens, at_least=at_least)
    assert sorted(i for tree in trees for i in tree.members) == list(range(len(samples)))
    assert len(trees) >= min(at_least, len(samples))
    for tree in trees:
        assert tree.shared[0] == 0 and (tree.n_tokens <= max_tokens or len(tree.members) == 1)
        assert len({groups[i] for i in tree.members}) == 1
        ids = tree.ids(batch)
        assert len(ids) == tree.n_tokens
        for i, path in zip(tree.members, tree.paths(), strict=True):
            assert ids[path].tolist() == samples[i][:-1]


@pytest.mark.parametrize("at_ends", [False, True])
def test_segments_are_the_tree_and_end_where_samples_do_if_asked(at_ends):
    from slime_megatron.batch.trees.segments import segments_of

    tree = TokenTree((60, 55, 58, 30, 12), (0, 40, 50, 20, 12), (1,) * 5)
    segments, ends = segments_of(tree, 100, at_ends=at_ends)
    first = [(100, 112), (112, 120)] if at_ends else [(100, 120)]
    assert [(s.rows.start, s.rows.stop) for s in segments] == [
        *first, (120, 140), (140, 160), (160, 170), (170, 175), (175, 183), (183, 193)
    ]  # fmt: skip
    for end, path, n in zip(ends, tree.paths(), tree.lengths, strict=True):
        rows = [row for segment in reversed(list(end.path())) for row in segment.rows]
        assert rows[: n if not at_ends else None] == (100 + path).tolist()
