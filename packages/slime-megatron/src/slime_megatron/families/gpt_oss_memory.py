"""`MEMORY`: what attention with sinks and experts with biases keep for the backward pass. Imports no torch."""

from __future__ import annotations

from slime_models.family.families.gpt_oss import GptOssArchitecture

from slime_megatron.memory.family_memory import FamilyMemory
from slime_megatron.memory.layer_parts import (
    FLOAT32,
    attention_bytes,
    norm_bytes,
    residual_rows,
    routed_rows,
    router_bytes,
)
from slime_megatron.memory.layout import Layout
from slime_megatron.memory.micro_batch import MicroBatchShape

#: Columns that queries, keys and values get for a sink: those of `slime_models.attention`, which imports torch.
_SINK = 8


def sink_attention_bytes(
    architecture: GptOssArchitecture, layout: Layout, shape: MicroBatchShape, layer: int
) -> int:
    """Return what attention with sinks keeps: queries, keys and values with columns for the sink. Masks are not counted."""
    a, each = architecture, shape.dtype_bytes
    if shape.recompute == "selective":
        return attention_bytes(a, layout, shape, layer)
    heads = a.num_attention_heads // layout.tensor
    query, key = a.query_size // layout.tensor, a.key_value_size // layout.tensor
    computed = FLOAT32 if shape.attends_in_float32 else each
    widened = 2 * (query + key) * (a.head_dim + _SINK) // a.head_dim
    found = computed * widened + each * query + FLOAT32 * heads
    rows = norm_bytes(a.hidden_size, shape) + each * a.hidden_size
    return shape.tokens * found + residual_rows(layout, shape) * rows


def biased_experts_bytes(
    architecture: GptOssArchitecture, layout: Layout, shape: MicroBatchShape, layer: int
) -> int:
    """Return what experts with biases and a clamped SwiGLU keep."""
    a, each = architecture, shape.dtype_bytes
    rows = norm_bytes(a.hidden_size, shape) + each * a.hidden_size
    width = (a.moe_ffn_hidden_size or 0) // layout.expert_tensor
    # The row; gate and up, each clamped, the sigmoid, its product with the gate, up and 1, their product, that times the route's gate.
    per_row = each * (a.hidden_size + 8 * width)
    found = residual_rows(layout, shape) * rows + router_bytes(a, layout, shape)
    return found + routed_rows(a, layout, shape) * per_row


MEMORY = FamilyMemory(mixer=sink_attention_bytes, mlp=biased_experts_bytes)
