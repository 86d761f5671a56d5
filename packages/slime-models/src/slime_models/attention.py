"""Scaled dot product attention, on CUDA by kernels that are ready for any shape."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

#: cuDNN's, which torch prefers on Hopper, is not among them: it builds a plan for every new shape, which takes tenths of a
#: second each, and packed sequences and growing caches have new shapes all the time.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def dot_product_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return `scaled_dot_product_attention` of the arguments, which are its.

    On CUDA the first of flash attention, memory-efficient attention and plain operations that takes them computes it.
    """
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value, **options)
    with sdpa_kernel(_KERNELS, set_priority=True):
        return F.scaled_dot_product_attention(query, key, value, **options)
