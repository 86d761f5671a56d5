"""Who trains on what: data-parallel shares of an optimizer step, and how even they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_models.family.architecture import Architecture

from ..batches import make_batch


@pytest.fixture(scope="module")
def rank_schedule(megatron):
    from slime_megatron.batch import rank_schedule

    return rank_schedule


def members_of(micro):
    return [tree.members for tree in micro.trees]


def test_the_differencing_method_finds_the_known_partition(rank_schedule):
    """Pairs (8, 7) (6, 5) (4, 3): differences 1, 1, 1; 8 + 5 | 7 + 6 is even, then 4 | 3 stays: 17 | 16."""
    found = rank_schedule.balance([8, 7, 6, 5, 4, 3], 2)
    assert sorted(sum([8, 7, 6, 5, 4, 3][i] for i in share) for share in found) == [16, 17]
    assert [len(share) for share in found] == [3, 3]


def test_one_expensive_item_gets_the_cheap_ones_beside_it(rank_schedule):
    """Dealt in turn, the first rank would have 100 + 10; here 100 + 1."""
    assert rank_schedule.balance([100, 10, 10, 1], 2) == [[0, 3], [1, 2]]


@settings(max_examples=50)
@given(n_ranks=st.integers(1, 5), per_rank=st.integers(0, 6), data=st.data())
def test_every_item_is_in_one_share_and_shares_have_as_many(rank_schedule, n_ranks, per_rank, data):
    n = n_ranks * per_rank
    costs = data.draw(st.lists(st.integers(0, 1000), min_size=n, max_size=n))
    shares = rank_schedule.balance(costs, n_ranks)
    assert sorted(i for share in shares for i in share) == list(range(n))
    assert {len(share) for share in shares} == {per_rank}


def test_shares_are_within_a_tenth_of_the_best_of_all(rank_schedule):
    draw = np.random.default_rng(0)
    for _ in range(20):
        costs = draw.integers(1, 100, 8).tolist()
        worst = max(sum(costs[i] for i in share) for share in rank_schedule.balance(costs, 2))
        splits = [s for s in product((0, 1), repeat=8) if sum(s) == 4]
        best = min(max(np.dot(costs, s), sum(costs) - np.dot(costs, s)) for s in splits)
        assert worst <= 1.1 * best


def test_a_number_of_items_that_does_not_divide_is_refused(rank_schedule):
    with pytest.raises(ValueError, match="3 items cannot be shared out equally among 2 ranks"):
        rank_schedule.balance([1, 2, 3], 2)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("max_tokens", [1000, 40, 12])
def test_counted_micro_batches_cover_every_sample_once_and_ranks_have_as_many(
    rank_schedule, n_ranks, max_tokens
):
    batch = make_batch()
    found = rank_schedule.rank_schedule(
        batch,
        [0, 1, 2, 3, 4, 5],
        n_ranks=n_ranks,
        max_tokens=max_tokens,
        share=True,
        cost=lambda f: f.n_tokens,
    )
    assert len({len(rank) for rank in found}) == 1
    micros = [micro for rank in found for micro in rank]
    counted = [i for micro in micros if micro.counted for tree in micro.trees for i in tree.members]
    assert sorted(counted) == [0, 1, 2, 3, 4, 5]
    if n_ranks == 8:  # six samples: two ranks get the shortest one, number 3 of 7 + 1 tokens, uncounted
        assert [members_of(micro) for micro in micros if not micro.counted] == [[(3,)], [(3,)]]


def test_samples_that_share_a_prompt_are_parted_for_ranks_that_have_none(rank_schedule):
    batch = make_batch(lengths=((5, 4),) * 4)
    tokens = np.tile(batch.tokens[:9], 4)
    batch = replace(batch, tokens=tokens, group_ids=np.zeros(4, dtype=np.int64))
    found = rank_schedule.rank_schedule(
        batch, range(4), n_ranks=2, max_tokens=1000, share=True, cost=lambda f: f.n_tokens
    )
    assert [[members_of(micro) for micro in rank] for rank in found] == [[[(0, 1)]], [[(2, 3)]]]


def test_flops_of_a_tree_are_those_counted_by_hand(megatron):
    from slime_megatron.batch.trees.flops import forward_flops
    from slime_megatron.batch.trees.token_tree import TokenTree

    architecture = Architecture(
        model_type="qwen3",
        num_layers=2,
        hidden_size=4,
        ffn_hidden_size=5,
        num_attention_heads=2,
        num_query_groups=1,
        head_dim=3,
        vocab_size=7,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    # A token passes 4 x 12 (qkv), 6 x 4 (output) and 3 x 4 x 5 (MLP) weights a layer: 132. Prompt 2 with continuations
    # of 1 and 2: 5 tokens; pairs 1 + 2, then 3, then 3 + 4: 13, each 2 x 6 products. Responses of 2 and 3 tokens.
    assert forward_flops(architecture, TokenTree.of_prompt(2, (1, 2))) == 2 * (
        2 * (132 * 5 + 12 * 13) + 4 * 7 * 5
    )
    experts = replace(architecture, num_moe_experts=8, moe_ffn_hidden_size=2, moe_router_topk=3)
    # The MLP is 3 of 8 experts, 3 x 4 x 2 each, and the router's 4 x 8: 104 in the place of 60.
    assert forward_flops(experts, TokenTree.of_prompt(2, ())) == 2 * (2 * ((132 + 44) * 2 + 12 * 3))
