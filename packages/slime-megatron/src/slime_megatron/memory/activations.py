"""What the micro-batches of a pipeline stage keep for their backward pass, and what that pass works with, in bytes.

`slime bench memory` compares with what is measured on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_megatron.memory.family_memory import FamilyMemory
from slime_megatron.memory.layer_parts import FLOAT32, norm_bytes, residual_rows, routed_rows, token_ranks
from slime_megatron.memory.layout import Layout
from slime_megatron.memory.micro_batch import MicroBatchShape

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture

_DECODER = FamilyMemory()
#: Bytes of logits that `token_log_probs` has in float32 at once (`log_probs._CHUNK_ELEMENTS`).
_FLOAT32_LOGITS = {"cpu": 2**21 * FLOAT32, "cuda": 2**24 * FLOAT32}


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one pipeline stage's rank."""

    kept: int
    """From the forward pass of a micro-batch until its backward pass."""
    working: int
    """The most that the backward pass has beside it."""


def activations_of_stage(
    architecture: Architecture,
    layout: Layout,
    shape: MicroBatchShape,
    *,
    stage: int,
    in_flight: int,
    memory: FamilyMemory = _DECODER,
) -> Activations:
    """Return what the micro-batches that are in flight on a stage keep, and what the backward pass of one works with.

    Args:
        architecture: of the model, its vocabulary padded.
        layout: how many ranks share what.
        shape: of a micro-batch.
        stage: of the pipeline, from 0.
        in_flight: micro-batches whose backward pass is still to come.
        memory: what the family's layers keep.
    """
    size = architecture.num_layers // layout.pipeline
    own = range(stage * size, (stage + 1) * size)
    layers = [layer_bytes(architecture, layout, shape, layer=layer, memory=memory) for layer in own]
    working = max(_backward_bytes(architecture, layout, shape, layer=layer) for layer in own)
    row = shape.tokens * shape.dtype_bytes * architecture.hidden_size // token_ranks(layout)
    n = shape.recomputed_layers
    if shape.recompute == "full" and shape.recompute_method == "block":
        kept = len(layers[:n]) * row + sum(layers[n:])
        working += max(layers[:n], default=0)
    elif shape.recompute == "full":
        kept = -(-len(layers) // n) * row
        working += max(sum(layers[i : i + n]) for i in range(0, len(layers), n))
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


def forward_of_stage(
    architecture: Architecture,
    layout: Layout,
    shape: MicroBatchShape,
    *,
    stage: int,
    memory: FamilyMemory = _DECODER,
) -> int:
    """Return the most that a forward pass without gradient works with, which keeps nothing: a layer at a time, or the head.

    A layer is reckoned with all that it would keep for a backward pass. Arguments are those of `activations_of_stage`.
    """
    size = architecture.num_layers // layout.pipeline
    own = range(stage * size, (stage + 1) * size)
    working = max(layer_bytes(architecture, layout, shape, layer=layer, memory=memory) for layer in own)
    if stage == layout.pipeline - 1:
        kept_by_head, _ = _head_bytes(architecture, layout, shape)
        head = max(
            _float32_logits(architecture, layout, shape), _float32_product(architecture, layout, shape)
        )
        working = max(working, kept_by_head + head)
    rows = shape.tokens if layout.sequence else 0  # Megatron keeps one buffer for rows that are gathered
    rows += shape.tokens // token_ranks(layout)
    return working + rows * shape.dtype_bytes * architecture.hidden_size


def layer_bytes(
    architecture: Architecture,
    layout: Layout,
    shape: MicroBatchShape,
    *,
    layer: int,
    memory: FamilyMemory = _DECODER,
) -> int:
    """Return what one decoder layer, `layer` of the whole model from 0, keeps of a micro-batch without full recomputation."""
    mixer = memory.mixer(architecture, layout, shape, layer)
    return mixer + memory.mlp(architecture, layout, shape, layer)


def _backward_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape, *, layer: int) -> int:
    """Return what the backward pass of a layer's MLP works with: gradients of what lies between its matrices."""
    a, each = architecture, shape.dtype_bytes
    rows = residual_rows(layout, shape) * 4 * each * a.hidden_size
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
    return rows + routed_rows(architecture, layout, shape) * 3 * each * a.hidden_size + stacks


def _head_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> tuple[int, int]:
    """Return what final norm and log-probs keep, and what their backward pass works with, every token being a response's."""
    a, each, hidden = architecture, shape.dtype_bytes, architecture.hidden_size
    columns = a.padded_vocab_size // layout.tensor
    at_once = min(shape.logits_tokens, shape.tokens)
    kept = residual_rows(layout, shape) * norm_bytes(hidden, shape) + shape.tokens * each * hidden
    kept += at_once * columns * each
    float32 = _float32_logits(a, layout, shape)
    weight = columns * hidden
    at_end = float32 * (2 if shape.with_entropy else 1) + weight * each
    working = shape.tokens * each * hidden + max(at_end, _float32_product(a, layout, shape))
    if shape.tokens > at_once:  # gradients of several chunks are added up
        working += weight * FLOAT32
    if shape.with_logits:  # of the whole vocabulary, their log-softmax, and a gradient of each
        kept += 2 * shape.tokens * a.padded_vocab_size * FLOAT32
        working += 2 * shape.tokens * a.padded_vocab_size * FLOAT32
    return kept, working


def _float32_logits(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> int:
    """Return what logits take that are in float32 at once."""
    row = architecture.padded_vocab_size // layout.tensor * FLOAT32
    return min(min(shape.logits_tokens, shape.tokens) * row, max(_FLOAT32_LOGITS[shape.device], row))


def _float32_product(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> int:
    """Return what the output layer's products take that are made in float32: logits, or their gradients, and the matrix."""
    if not shape.multiplies_in_float32:
        return 0
    columns = architecture.padded_vocab_size // layout.tensor
    return (min(shape.logits_tokens, shape.tokens) + architecture.hidden_size) * columns * FLOAT32


def _embedding_bytes(architecture: Architecture, layout: Layout, shape: MicroBatchShape) -> int:
    return architecture.padded_vocab_size // layout.tensor * architecture.hidden_size * shape.dtype_bytes


def in_flight(layout: Layout, stage: int) -> int:
    """Return how many micro-batches wait for their backward pass on a stage, in Megatron's schedule 1F1B."""
    return layout.pipeline - stage
