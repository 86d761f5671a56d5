"""How much work a packed family is: floating point operations, counted from the architecture."""

from __future__ import annotations

from slime_models.architecture import Architecture

from slime_megatron.packed import Family


def forward_flops(architecture: Architecture, family: Family) -> int:
    """Return the floating point operations of the model's matrix products over a family, forward; backward is twice that.

    A product of an [m, k] and a [k, n] matrix counts 2 m k n, and attention what a causal mask leaves. A token that
    predicts a response token passes the output layer.
    """
    a = architecture
    experts = (a.moe_ffn_hidden_size or 0) * (a.moe_router_topk or 0)
    experts += a.moe_shared_expert_intermediate_size or 0
    n_moe = len(a.moe_layers)
    mlps = 3 * a.ffn_hidden_size * (a.num_layers - n_moe) + n_moe * (3 * experts + (a.num_moe_experts or 0))
    layers = a.hidden_size * (a.num_layers * (a.qkv_size + a.query_size) + mlps)
    pairs = _seen(family.prompt, 0) + sum(_seen(n, family.prompt) for n in family.continuations)
    responses = sum(n + 1 for n in family.continuations)
    return 2 * (
        layers * family.n_tokens
        + a.num_layers * 2 * a.query_size * pairs
        + a.hidden_size * a.vocab_size * responses
    )


def _seen(n: int, before: int) -> int:
    """Return how many keys `n` causal queries see together, after `before` tokens."""
    return n * before + n * (n + 1) // 2
