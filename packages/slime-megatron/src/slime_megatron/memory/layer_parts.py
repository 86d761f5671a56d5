"""What the parts of a decoder layer keep for the backward pass, in bytes, where `Architecture` says all of them.

Counted from the code that runs: Megatron's layers as `model.layer_spec` puts them together, `PackedAttention`, `RMSNorm`, `swiglu`,
`GroupedExperts` and `LocalDispatcher`. On CUDA two things are taken from torch's code and not from a measurement: torch's RMSNorm
keeps its input, as ours does on a CPU, and attention is a flash kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_megatron.memory.layout import Layout
from slime_megatron.memory.micro_batch import MicroBatchShape

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture

#: Bytes of a number.
FLOAT32, INT64 = 4, 8
#: First bits of an expert's number of rows on a CPU that may differ from 0: `local_experts.BITS`, which needs torch.
_FILLED_BITS = 4


def attention_bytes(
    architecture: Architecture, layout: Layout, shape: MicroBatchShape, layer: int = 0
) -> int:
    """Return what grouped-query attention keeps, with the norms around it; all layers as much."""
    a, each = architecture, shape.dtype_bytes
    heads = a.num_attention_heads // layout.tensor
    query, key = a.query_size // layout.tensor, a.key_value_size // layout.tensor
    mixed = each * (query + 2 * key)  # the fused projection, of which values are a view
    found = 0
    if a.qk_layernorm:
        groups = a.num_query_groups // layout.tensor
        found += norm_bytes(query, shape, groups=heads)
        found += norm_bytes(key, shape, groups=groups)
        found -= each * key  # the input of its norm is part of `mixed`
    if shape.recompute == "selective":
        found += each * query + (each * key if a.qk_layernorm else 0) + mixed + each * query
    elif shape.attends_in_float32:
        found += FLOAT32 * (2 * query + 2 * key) + each * query + FLOAT32 * heads
        found += mixed if a.qk_layernorm else 0
    elif shape.device == "cuda" and (each < FLOAT32 or query > key):
        # Values are no view: the call of variable lengths copies them, and in float32 keys and values are repeated for all heads.
        found += each * (2 * query + (2 * query if each == FLOAT32 else 2 * key)) + FLOAT32 * heads
        found += mixed if a.qk_layernorm else 0
    else:
        found += each * (2 * query + key) + mixed + FLOAT32 * heads
    norms = 1 + a.post_layernorms
    return shape.tokens * found + residual_rows(layout, shape) * (
        norms * norm_bytes(a.hidden_size, shape) + each * a.hidden_size
    )


def mlp_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape, layer: int) -> int:
    """Return what a layer's MLP or experts keep, with the norms around it."""
    a, each, rows = architecture, shape.dtype_bytes, residual_rows(layout, shape)
    found = rows * ((1 + a.post_layernorms) * norm_bytes(a.hidden_size, shape) + each * a.hidden_size)
    if layer not in a.moe_layers:  # gate and up, and the product
        return found + shape.tokens * 3 * each * a.ffn_hidden_size // layout.tensor
    shared = (a.moe_shared_expert_intermediate_size or 0) // layout.tensor
    found += shape.tokens * 3 * each * shared
    if a.moe_shared_expert_gate:  # what it gives, and the gate
        found += rows * each * (a.hidden_size + 1)
    width = (a.moe_ffn_hidden_size or 0) // layout.expert_tensor
    # The row, gate and up, the product times the gate of the route.
    per_row = each * (a.hidden_size + 3 * width)
    return found + router_bytes(a, layout, shape) + routed_rows(a, layout, shape) * per_row


def router_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> int:
    """Return what a router keeps, and what of the way to experts: chosen experts, their gates, where rows go, how they were chosen."""
    a, experts, top_k = architecture, architecture.num_moe_experts or 0, architecture.moe_router_topk or 0
    found = top_k * (INT64 + FLOAT32)
    sends = not is_local(layout)
    if sends:  # Megatron's dispatchers: a mark for each expert, besides
        found += top_k * (INT64 + FLOAT32) + INT64 * experts
    if a.moe_router_score_function == "sigmoid":  # all scores, and the sum of those that are chosen
        found += FLOAT32 * (experts + 1)
    if (
        a.moe_router_num_groups and a.moe_router_group_topk
    ):  # the best of each group, the best groups, a mark for each expert
        best = a.moe_router_num_groups * (top_k // a.moe_router_group_topk)
        found += INT64 * (best + a.moe_router_group_topk) + experts
    rows = 0 if sends else routed_rows(a, layout, shape) * (2 * INT64 + FLOAT32)
    return residual_rows(layout, shape) * found + rows


def is_local(layout: Layout) -> bool:
    """Return whether one rank has all experts, each whole: `LocalDispatcher` sorts tokens then."""
    return layout.experts == layout.expert_tensor == 1


def norm_bytes(width: int, shape: MicroBatchShape, *, groups: int = 1) -> int:
    """Return what an RMSNorm keeps of a token: its input, and a scale in float32.

    Args:
        width: of all that is normalised.
        shape: of the micro-batch.
        groups: in which it is, each with a scale.
    """
    return shape.dtype_bytes * width + FLOAT32 * groups


def residual_rows(layout: Layout, shape: MicroBatchShape) -> int:
    """Return the tokens of which this rank has whole rows of the residual stream."""
    return -(-shape.tokens // token_ranks(layout))


def token_ranks(layout: Layout) -> int:
    """Return among how many ranks the tokens of the residual stream are shared out."""
    return layout.tensor if layout.sequence else 1


def routed_rows(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> int:
    """Return how many rows this rank's experts get where all experts get as many, with those that fill up on a CPU."""
    a = architecture
    rows = residual_rows(layout, shape) * (a.moe_router_topk or 0) * layout.expert_tensor
    if not a.num_moe_experts or shape.device != "cpu" or not is_local(layout):
        return rows
    step = 1 << max(0, (rows // a.num_moe_experts).bit_length() - _FILLED_BITS)
    return rows + a.num_moe_experts * (step - 1) // 2
