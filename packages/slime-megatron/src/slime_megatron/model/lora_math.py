"""The two matrices of a LoRA adapter: their names, and merging them into a weight. Imports torch, and not megatron."""

from __future__ import annotations

import torch
from torch import Tensor

#: Names of the two matrices, beside `weight` of their layer.
A, B = "lora_a", "lora_b"


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.rpartition(".")[2] in (A, B)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale B A, computed in float32, in the weight's dtype."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)
