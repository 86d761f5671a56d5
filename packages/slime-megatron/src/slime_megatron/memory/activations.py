"""What a micro-batch keeps for its backward pass, and what that pass works with, in bytes.

Counted from the code that runs: Megatron's layers as `model.layer_spec` puts them together, `PackedAttention`, torch's norms and
`token_log_probs`. `slime bench memory` compares with what is measured on a CPU. On CUDA two things are taken from torch's
code and not from a measurement: RMSNorm keeps its input instead of two float32 copies, and attention is a flash kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime_models.family.families.delta_net import DeltaNetArchitecture
from slime_models.family.families.latent_attention.rules import LatentArchitecture

from slime_megatron.memory.delta_net import delta_net_token_bytes
from slime_megatron.memory.layout import Layout

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture

_FLOAT32, _INT64 = 4, 8
#: Bytes of logits that `token_log_probs` has in float32 at once (`log_probs._CHUNK_ELEMENTS`).
_FLOAT32_LOGITS = {"cpu": 2**21 * _FLOAT32, "cuda": 2**24 * _FLOAT32}


@dataclass(frozen=True, kw_only=True)
class MicroBatchShape:
    """A micro-batch on one rank, and how it is computed."""

    tokens: int
    """Of the packed row, this rank's under context parallelism."""
    dtype_bytes: int
    """Of a number of the dtype that is computed in."""
    device: Literal["cpu", "cuda"]
    """What it is computed on."""
    attends_in_float32: bool = False
    """Whether attention computes in float32 whatever the dtype; see `model.attention`."""
    recompute: Literal["full", "selective"] | None = None
    """What is computed again in the backward pass instead of being kept."""
    logits_tokens: int = 4096
    """Tokens whose logits are held at once."""
    with_entropy: bool = False
    """Whether the loss reads entropies."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one pipeline stage's rank."""

    kept: int
    """From the forward pass of a micro-batch until its backward pass."""
    working: int
    """The most that the backward pass has beside it."""


def activations_of_stage(
    architecture: Architecture, layout: Layout, shape: MicroBatchShape, *, stage: int, in_flight: int
) -> Activations:
    """Return what the micro-batches that are in flight on a stage keep, and what the backward pass of one works with.

    Args:
        architecture: of the model, its vocabulary padded.
        layout: how many ranks share what.
        shape: of a micro-batch.
        stage: of the pipeline, from 0.
        in_flight: micro-batches whose backward pass is still to come.
    """
    size = architecture.num_layers // layout.pipeline
    own = range(stage * size, (stage + 1) * size)
    layers = [layer_bytes(architecture, layout, shape, layer=layer) for layer in own]
    working = max(_backward_bytes(architecture, layout, shape, layer=layer) for layer in own)
    row = shape.tokens * shape.dtype_bytes * architecture.hidden_size // _token_ranks(layout)
    if shape.recompute == "full":
        kept = len(layers) * row
        working += max(layers)
    else:
        kept = sum(layers)
    kept_by_head = working_of_head = 0
    if stage == layout.pipeline - 1:
        kept_by_head, working_of_head = _head_bytes(architecture, layout, shape)
        if architecture.tie_word_embeddings and layout.pipeline == 1:  # until the embedding adds its own
            working += _embedding_bytes(architecture, layout, shape)
    if layout.sequence:  # Megatron keeps one buffer for rows that are gathered
        kept += shape.tokens * shape.dtype_bytes * architecture.hidden_size
    return Activations(kept=in_flight * kept, working=max(working, kept_by_head + working_of_head))


def layer_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape, *, layer: int) -> int:
    """Return what one decoder layer, `layer` of the whole model from 0, keeps of a micro-batch without full recomputation."""
    if isinstance(architecture, DeltaNetArchitecture):
        mixer = _delta_net_bytes(architecture, layout, shape, layer)
    elif isinstance(architecture, LatentArchitecture):
        mixer = _latent_attention_bytes(architecture, layout, shape)
    else:
        mixer = _attention_bytes(architecture, layout, shape)
    return mixer + _mlp_bytes(architecture, layout, shape, layer)


def _delta_net_bytes(
    architecture: DeltaNetArchitecture, layout: Layout, shape: MicroBatchShape, layer: int
) -> int:
    """Return what a delta net keeps, or attention with a gate for each of its outputs."""
    a, each = architecture, shape.dtype_bytes
    if layer not in a.linear_layers:  # gates, their sigmoid in float32, and what it multiplies
        gate = (2 * each + _FLOAT32) * a.query_size // layout.tensor
        return _attention_bytes(a, layout, shape) + shape.tokens * gate
    row = _norm(a.hidden_size, shape) + each * a.hidden_size
    own = delta_net_token_bytes(a, share=layout.tensor, dtype_bytes=each)
    return _rows(layout, shape) * row + shape.tokens * own


def _attention_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> int:
    a, each = architecture, shape.dtype_bytes
    heads = a.num_attention_heads // layout.tensor
    query, key = a.query_size // layout.tensor, a.key_value_size // layout.tensor
    mixed = each * (query + 2 * key)  # the fused projection, of which values are a view
    found = 0
    if a.qk_layernorm:
        groups = a.num_query_groups // layout.tensor
        found += _norm(query, shape, groups=heads)
        found += _norm(key, shape, groups=groups)
        if shape.device == "cuda" or each == _FLOAT32:  # the input of the keys' norm is part of `mixed`
            found -= each * key
    if shape.recompute == "selective":
        found += each * query + (each * key if a.qk_layernorm else 0) + mixed + each * query
    elif shape.attends_in_float32:
        found += _FLOAT32 * (2 * query + 2 * key) + each * query + _FLOAT32 * heads
    else:
        found += each * (2 * query + key) + mixed + _FLOAT32 * heads
    norms = 1 + a.post_layernorms
    return shape.tokens * found + _rows(layout, shape) * (
        norms * _norm(a.hidden_size, shape) + each * a.hidden_size
    )


def _latent_attention_bytes(architecture: LatentArchitecture, layout: Layout, shape: MicroBatchShape) -> int:
    """Return what `families.latent_attention` keeps: latent vectors of this rank's rows, and all heads' queries, keys and values."""
    a, each = architecture, shape.dtype_bytes
    heads = a.num_attention_heads // layout.tensor
    width = max(a.head_dim, a.v_head_dim)  # of all that the kernel gets
    rows = _norm(a.hidden_size, shape) + each * a.hidden_size
    for latent in (a.kv_lora_rank, a.q_lora_rank or 0):  # before its norm, and after
        rows += (_norm(latent, shape) + each * latent) if latent else 0
    if (
        shape.device == "cuda" or each == _FLOAT32
    ):  # the norm's input is a part of what else holds the rotated key
        rows += each * a.qk_rope_head_dim
    padded = width > a.v_head_dim
    value = heads * (width if padded else a.qk_nope_head_dim + a.v_head_dim)  # else a view of the projection
    output = each * heads * (a.v_head_dim + (width if padded else 0))
    if shape.recompute == "selective":
        value = heads * (a.qk_nope_head_dim + a.v_head_dim)
        found = each * (2 * heads * a.head_dim + value) + each * heads * a.v_head_dim
    elif shape.attends_in_float32:
        found = _FLOAT32 * (4 * heads * width + heads) + each * heads * a.v_head_dim
    else:
        found = each * (2 * heads * width + value) + output + _FLOAT32 * heads
    return shape.tokens * found + _rows(layout, shape) * rows


def _mlp_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape, layer: int) -> int:
    a, each, rows = architecture, shape.dtype_bytes, _rows(layout, shape)
    found = rows * ((1 + a.post_layernorms) * _norm(a.hidden_size, shape) + each * a.hidden_size)
    if layer not in a.moe_layers:  # gate and up, a copy of up, silu of the gate, the product
        return found + shape.tokens * 5 * each * a.ffn_hidden_size // layout.tensor
    shared = (a.moe_shared_expert_intermediate_size or 0) // layout.tensor
    found += shape.tokens * 5 * each * shared
    if a.moe_shared_expert_gate:  # what it gives, and the gate
        found += rows * each * (a.hidden_size + 1)
    routes = _router_bytes(a)
    width = (a.moe_ffn_hidden_size or 0) // layout.expert_tensor
    per_route = each * (
        a.hidden_size + 5 * width
    )  # as above, without the copy; and the product times the route's gate
    return found + rows * routes + _routed_rows(architecture, layout, shape) * per_route


def _router_bytes(architecture: Architecture) -> int:
    """Return what a router keeps of a token: chosen experts, their gates, where rows go, and how they were chosen."""
    a, experts, top_k = architecture, architecture.num_moe_experts or 0, architecture.moe_router_topk or 0
    found = top_k * (2 * _INT64 + 2 * _FLOAT32) + _INT64 * experts
    if a.moe_router_score_function == "sigmoid":  # all scores, and the sum of those that are chosen
        found += _FLOAT32 * (experts + 1)
    if (
        a.moe_router_num_groups and a.moe_router_group_topk
    ):  # the best of each group, the best groups, a mark for each expert
        best = a.moe_router_num_groups * (top_k // a.moe_router_group_topk)
        found += _INT64 * (best + a.moe_router_group_topk) + experts
    return found


def _backward_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape, *, layer: int) -> int:
    """Return what the backward pass of a layer's MLP works with: gradients of what lies between its matrices."""
    a, each = architecture, shape.dtype_bytes
    rows = _rows(layout, shape) * 4 * each * a.hidden_size
    if layer not in a.moe_layers:
        return rows + shape.tokens * 4 * each * a.ffn_hidden_size // layout.tensor
    stacks = 0
    if shape.device == "cuda":  # of fc1 of all local experts, for a grouped product, and of its gradients
        matrices = (
            (a.num_moe_experts or 0)
            // layout.experts
            * 2
            * (a.moe_ffn_hidden_size or 0)
            // layout.expert_tensor
        )
        stacks = 2 * each * matrices * a.hidden_size
    return rows + _routed_rows(architecture, layout, shape) * 3 * each * a.hidden_size + stacks


def _head_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> tuple[int, int]:
    """Return what final norm and log-probs keep, and what their backward pass works with, every token being a response's."""
    a, each, hidden = architecture, shape.dtype_bytes, architecture.hidden_size
    columns = a.padded_vocab_size // layout.tensor
    at_once = min(shape.logits_tokens, shape.tokens)
    kept = _rows(layout, shape) * _norm(hidden, shape) + shape.tokens * each * hidden
    kept += at_once * columns * each
    float32 = min(at_once * columns * _FLOAT32, max(_FLOAT32_LOGITS[shape.device], columns * _FLOAT32))
    working = shape.tokens * each * hidden + float32 * (2 if shape.with_entropy else 1)
    weight = columns * hidden
    in_float32 = shape.tokens > at_once  # gradients of several chunks are added up
    return kept, working + weight * (each + (_FLOAT32 if in_float32 else 0))


def _embedding_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> int:
    return architecture.padded_vocab_size // layout.tensor * architecture.hidden_size * shape.dtype_bytes


def _norm(width: int, shape: MicroBatchShape, *, groups: int = 1) -> int:
    """Return what an RMSNorm keeps of a token: on a CPU input and normalised input, both float32, on CUDA its input alone.

    Args:
        width: of all that is normalised.
        shape: of the micro-batch.
        groups: in which it is, each with a scale.
    """
    kept = 2 * _FLOAT32 if shape.device == "cpu" else shape.dtype_bytes
    return kept * width + _FLOAT32 * groups


def _rows(layout: Layout, shape: MicroBatchShape) -> int:
    """Return the tokens of which this rank has whole rows of the residual stream."""
    return -(-shape.tokens // _token_ranks(layout))


def _token_ranks(layout: Layout) -> int:
    return layout.tensor if layout.sequence else 1


def _routed_rows(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> int:
    """Return how many rows this rank's experts get where all experts get as many."""
    return _rows(layout, shape) * (architecture.moe_router_topk or 0) * layout.expert_tensor


def micro_batch_tokens(
    *, max_tokens_per_gpu: int, longest_sample: int, samples_per_rank: int, layout: Layout
) -> int:
    """Return the most tokens that a rank has of one micro-batch.

    Args:
        max_tokens_per_gpu: the setting; only a sample that is longer by itself exceeds it.
        longest_sample: tokens of the longest sample.
        samples_per_rank: of an optimizer step, of each data-parallel replica.
        layout: of the ranks, of which context-parallel ones share each sample.
    """
    alone = -(-longest_sample // layout.context)
    return max(alone, min(max_tokens_per_gpu, samples_per_rank * alone))


def in_flight(layout: Layout, stage: int) -> int:
    """Return how many micro-batches wait for their backward pass on a stage, in Megatron's schedule 1F1B."""
    return layout.pipeline - stage
