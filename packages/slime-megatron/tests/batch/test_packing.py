"""Packed rows: which padded batch each token is in, and attention over tokens that are shared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


def packed_of(*prompt_groups):
    from slime_megatron.batch.packing import pack
    from slime_megatron.batch.trees.token_tree import TokenTree

    return pack(
        [TokenTree.of_prompt(*group) for group in prompt_groups],
        (torch.arange(130.0)[:, None], torch.zeros(130, 1)),
    )


def test_batches_hold_sequences_of_like_length():
    packed = packed_of(*((n, ()) for n in (44, 90, 80, 70, 60, 44, 30, 3)))
    assert [(batch.size, batch.length) for batch in packed.batches] == [
        (3, 90),  # 60 < 0.75 * 90
        (1, 60),  # 44 < 0.75 * 60
        (2, 44),
        (1, 30),
        (1, 3),
    ]
    assert all(batch.parent is None for batch in packed.batches)
    # The row begins with a sequence of 44 tokens, which stands after 3 * 90 + 60 slots.
    assert packed.padding_map.slots[[0, 43, 44, 133, 134, 213, 214]].tolist() == [
        330,
        373,
        0,
        89,
        90,
        169,
        180,
    ]
    assert packed_of((44, ()), (44, ())).padding_map is None


def test_shared_prompt_stands_once_and_its_suffixes_after_it():
    """Prompt 0 1, suffixes 2 3 and 4; a lone sequence 5 6 7; a prompt 8 9 with one suffix 10."""
    from slime_megatron.batch.packing import PaddedSegments

    packed = packed_of((2, (2, 1)), (3, ()), (2, (1,)))
    assert packed.cos.flatten().tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 0, 1, 2]  # positions
    assert packed.batches == (
        PaddedSegments(size=2, length=3),
        PaddedSegments(size=1, length=2),
        PaddedSegments(parent=1, first=0, n_parents=1, before=2, size=2, length=2),
    )
    assert packed.padding_map.tokens.tolist() == [5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 0]
    assert packed.padding_map.slots.tolist() == [6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5]
    assert (packed.n_tokens, packed.n_slots) == (11, 12)


def test_prompts_of_one_length_with_as_many_suffixes_go_together():
    from slime_megatron.batch.packing import PaddedSegments

    packed = packed_of((30, (4, 2)), (30, (3, 3, 1)), (28, (2, 2)), (30, (1, 5)), (30, (90, 2)), (30, (0, 0)))
    assert packed.batches == (
        PaddedSegments(size=6, length=30),
        PaddedSegments(parent=0, first=1, n_parents=1, before=30, size=3, length=3),
        PaddedSegments(parent=0, first=2, n_parents=2, before=30, size=2, length=5),
        PaddedSegments(parent=0, first=4, n_parents=1, before=30, size=1, length=90),  # 32 < 0.75 * 120
        PaddedSegments(parent=0, first=4, n_parents=1, before=30, size=1, length=2),
        PaddedSegments(parent=0, first=5, n_parents=1, before=28, size=2, length=2),
    )


#: A conversation of 60 tokens; a fork of it after 40, one of that fork after 50, one after 20; the first turn by itself.
FORKS = ((60, 55, 58, 30, 12), (0, 40, 50, 20, 12), (8, 45, 8, 8, 8))


def test_forks_of_forks_follow_what_they_share_level_by_level():
    """Row: 0-59, 15 of the first fork, 8 of its own fork, 10 of the last; the first turn adds nothing.

    It is cut where they part: 0-19, 20-39 | 40-59; 60-69 | 70-74; 75-82; 83-92.
    """
    from slime_megatron.batch.packing import PaddedSegments, pack
    from slime_megatron.batch.trees.token_tree import TokenTree, predicting_rows

    tree = TokenTree(*FORKS)
    packed = pack([tree], (torch.arange(60.0)[:, None], torch.zeros(60, 1)))
    assert tree.n_tokens == packed.n_tokens == 93
    assert packed.cos.flatten().tolist() == [*range(60), *range(40, 55), *range(50, 58), *range(20, 30)]
    assert packed.batches == (
        PaddedSegments(size=1, length=20),
        PaddedSegments(parent=0, n_parents=1, before=20, size=2, length=20),  # 30 tokens are 0.75 of 40
        PaddedSegments(parent=1, n_parents=1, before=40, size=2, length=20),  # 50 of 60
        PaddedSegments(parent=2, first=1, n_parents=1, before=50, size=2, length=8),  # 55 of 58
    )
    padding = [0] * 10
    assert packed.padding_map.tokens.tolist() == [
        *range(40), *range(83, 93), *padding, *range(40, 70), *padding, *range(75, 83), *range(70, 75), 0, 0, 0,
    ]  # fmt: skip
    # Of each sample: the last token of its prompt and those of its response without the last.
    assert predicting_rows([tree]).tolist() == [
        *range(7, 60),
        *range(64, 75),
        *(*range(7, 40), *range(60, 70), *range(75, 83)),
        *(*range(7, 20), *range(83, 93)),
        *range(7, 12),
    ]


@pytest.mark.parametrize("groups", [1, 3])
def test_attention_over_shared_tokens_is_that_over_copies(groups):
    """Output and gradients, float64, against each sequence by itself through an explicit softmax."""
    from slime_megatron.batch.packing import pack
    from slime_megatron.batch.trees.token_tree import TokenTree
    from slime_megatron.model.layers.attention import PackedAttention

    prompt_groups = [(5, (3, 1, 40, 3)), (2, ()), (4, (2,)), (5, (1, 2, 2, 39)), (3, (0, 0)), (1, (7, 6))]
    trees = [*(TokenTree.of_prompt(*group) for group in prompt_groups), TokenTree(*FORKS)]
    packed = pack(trees, (torch.arange(130.0)[:, None], torch.zeros(130, 1)))
    t = packed.n_tokens
    packed.cos, packed.sin = (
        torch.ones(t, 1, 8, dtype=torch.float64),
        torch.zeros(t, 1, 8, dtype=torch.float64),
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v, weights = (
        torch.randn(t, heads, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (3, groups, groups, 3)
    )
    config = SimpleNamespace(attention_dropout=0.0, window_size=None, rotary_interleaved=False)
    found = PackedAttention(config)(q, k, v, None, packed_seq_params=packed).view(t, 3, 8)

    wanted = torch.zeros(t, 3, 8, dtype=torch.float64)
    start = 0
    for tree in trees:
        for path in tree.paths():
            rows = torch.from_numpy(start + path)
            keys, values = (x[rows].repeat_interleave(3 // groups, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / 8**0.5
            future = torch.ones(len(rows), len(rows)).triu(1).bool()
            probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
            wanted = wanted.index_copy(0, rows, torch.einsum("hqk,khd->qhd", probabilities, values))
        start += tree.n_tokens
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
