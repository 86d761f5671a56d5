"""FLOPs of a tree's forward pass, counted from the architecture."""

from __future__ import annotations

from slime_models.family.architecture import Architecture

from slime_megatron.batch.trees.token_tree import TokenTree


def forward_flops(architecture: Architecture, tree: TokenTree) -> int:
    """Return the FLOPs of the model's matrix products over a tree of samples, forward; backward is twice as many.

    A product of an [m, k] and a [k, n] matrix counts 2 m k n, and attention what a causal mask leaves. A token that
    predicts a response token passes the output layer.
    """
    a = architecture
    experts = (a.moe_ffn_hidden_size or 0) * (a.moe_router_topk or 0)
    experts += a.moe_shared_expert_intermediate_size or 0
    n_moe, routers = len(a.moe_layers), (a.num_moe_experts or 0) + a.moe_shared_expert_gate
    mlps = 3 * a.ffn_hidden_size * (a.num_layers - n_moe) + n_moe * (3 * experts + routers)
    layers = a.num_layers * a.attention_size + a.hidden_size * mlps
    pairs = seen_pairs(tree)
    return 2 * (
        layers * tree.n_tokens
        + a.num_layers * (a.query_size + a.value_size) * pairs
        + a.hidden_size * a.vocab_size * tree.n_predicted
    )


def seen_pairs(tree: TokenTree) -> int:
    """Return how many pairs of a token and one that it sees a tree has, under a causal mask."""
    return sum(_seen(stop - start, start) for start, stop in tree.spans)


def _seen(n: int, before: int) -> int:
    """Return the number of (query, key) pairs of `n` causal queries that follow `before` tokens."""
    return n * before + n * (n + 1) // 2


def pairs_before_window(tree: TokenTree, window: int) -> int:
    """Return how many of a tree's causal (query, key) pairs a window of so many tokens, the query among them, hides."""
    return sum(_beyond(stop - window) - _beyond(start - window) for start, stop in tree.spans)


def _beyond(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0
