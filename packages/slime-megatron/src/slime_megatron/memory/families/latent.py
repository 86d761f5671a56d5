"""`MEMORY`: what latent attention keeps for the backward pass. Imports no torch."""

from __future__ import annotations

from slime_models.family.families.latent_attention.rules import LatentArchitecture

from slime_megatron.memory.family_memory import FamilyMemory
from slime_megatron.memory.layer_parts import FLOAT32, norm_bytes, residual_rows
from slime_megatron.memory.layout import Layout
from slime_megatron.memory.micro_batch import MicroBatchShape


def latent_attention_bytes(
    architecture: LatentArchitecture, layout: Layout, shape: MicroBatchShape, layer: int
) -> int:
    """Return what `families.latent_attention` keeps: latent vectors of this rank's rows, and all heads' queries, keys and values."""
    a, each = architecture, shape.dtype_bytes
    heads = a.num_attention_heads // layout.tensor
    width = max(a.head_dim, a.v_head_dim)  # of all that the kernel gets
    rows = norm_bytes(a.hidden_size, shape) + each * a.hidden_size
    for latent in (a.kv_lora_rank, a.q_lora_rank or 0):  # before its norm, and after
        rows += (norm_bytes(latent, shape) + each * latent) if latent else 0
    rows += each * a.qk_rope_head_dim  # the norm's input is a part of what else holds the rotated key
    padded = width > a.v_head_dim
    value = heads * (width if padded else a.qk_nope_head_dim + a.v_head_dim)  # else a view of the projection
    output = each * heads * (a.v_head_dim + (width if padded else 0))
    if shape.recompute == "selective":
        value = heads * (a.qk_nope_head_dim + a.v_head_dim)
        found = each * (2 * heads * a.head_dim + value) + each * heads * a.v_head_dim
    elif shape.attends_in_float32:
        found = FLOAT32 * (4 * heads * width + heads) + each * heads * a.v_head_dim
    else:
        found = each * (2 * heads * width + value) + output + FLOAT32 * heads
    return shape.tokens * found + residual_rows(layout, shape) * rows


MEMORY = FamilyMemory(mixer=latent_attention_bytes)
