"""`MEMORY`: what gated delta nets, and the attention beside them, keep for the backward pass. Imports no torch."""

from __future__ import annotations

from slime_models.family.families.delta_net import DeltaNetArchitecture

from slime_megatron.memory.family_memory import FamilyMemory
from slime_megatron.memory.layer_parts import FLOAT32, attention_bytes, norm_bytes, residual_rows
from slime_megatron.memory.layout import Layout
from slime_megatron.memory.micro_batch import MicroBatchShape

#: Tokens of a chunk: `slime_models.delta_rule.CHUNK`, which cannot be imported without torch.
CHUNK = 64


def delta_net_bytes(
    architecture: DeltaNetArchitecture, layout: Layout, shape: MicroBatchShape, layer: int
) -> int:
    """Return what a delta net keeps, or attention with a gate for each of its outputs."""
    a, each = architecture, shape.dtype_bytes
    if layer not in a.linear_layers:  # gates, their sigmoid in float32, and what it multiplies
        gate = (2 * each + FLOAT32) * a.query_size // layout.tensor
        return attention_bytes(a, layout, shape, layer) + shape.tokens * gate
    row = norm_bytes(a.hidden_size, shape) + each * a.hidden_size
    own = token_bytes(a, share=layout.tensor, dtype_bytes=each)
    return residual_rows(layout, shape) * row + shape.tokens * own


def token_bytes(architecture: DeltaNetArchitecture, *, share: int, dtype_bytes: int) -> int:
    """Return the bytes that one rank keeps of a token of a long sequence, without those of the layer's norm and input.

    Args:
        architecture: of the model.
        share: ranks among which the heads are shared out.
        dtype_bytes: of a number of the dtype that is computed in.
    """
    a = architecture
    heads, key_heads = a.linear_num_value_heads // share, a.linear_num_key_heads // share
    key, value, width = a.linear_key_size // share, a.linear_value_size // share, a.linear_value_head_dim
    each, channels, repeated = dtype_bytes, a.linear_qkv_size // share, heads * a.linear_key_head_dim
    # The projection, of which the gates are a part or a copy; inputs and outputs of the convolution; queries, keys and values.
    found = (each * a.linear_in_size // share) if each == FLOAT32 else FLOAT32 * value
    found += 2 * each * channels + FLOAT32 * channels
    in_float32 = 2 * key  # keys of length 1, and scaled queries
    in_float32 += CHUNK * (
        4 * heads + 2 * key_heads
    )  # products of a chunk's tokens, with and without decay and beta
    in_float32 += (
        2 * repeated + (repeated + value) + value
    )  # what is read and written, the solution, the corrected values
    in_float32 += repeated * width // CHUNK  # a state for each chunk
    in_float32 += 2 * value + 8 * heads  # norm and gates of the output; numbers of each head
    return found + FLOAT32 * in_float32 + 3 * each * value


MEMORY = FamilyMemory(mixer=delta_net_bytes)
