"""Scaled dot product attention, on CUDA by kernels that are ready for any shape."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.attention.bias import CausalBias, causal_lower_right

#: cuDNN's, which torch prefers on Hopper, is not among them: it builds a plan for every new shape, which takes tenths of a
#: second each, and packed sequences and growing caches have new shapes all the time.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


#: Columns that queries, keys and values get for a sink; a multiple of 8, as kernels on CUDA want it.
_EXTRA = 8
#: Columns of a head, at most, that torch's flash kernel takes.
_WIDEST_HEAD = 256
#: From torch 2.12 on the kernel's function has to be told that several heads share keys and values; before, it sees it.
#: From torch 2.12 on the kernel's function has to be told that several heads share keys and values; before, it sees it.
TELLS_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None, **options: Any
) -> Tensor:
    """Return `scaled_dot_product_attention` of the arguments, which are its.

    On CUDA the first of flash attention, memory-efficient attention and plain operations that takes them computes it.

    Args:
        query: [..., heads, tokens, head_dim].
        key: [..., groups, tokens, head_dim].
        value: [..., groups, tokens, head_dim].
        sinks: [heads] or [heads, tokens]: the score of one key more, which all tokens see, and whose value is zero.
        options: the other arguments.
    """
    if sinks is not None:
        return _with_sinks(query, key, value, sinks, **options)
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value, **options)
    with sdpa_kernel(_KERNELS, set_priority=True):
        return F.scaled_dot_product_attention(query, key, value, **options)


def fits_variable_lengths(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether `variable_length_attention` takes heads of this width and dtype. It is for CUDA alone."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return is_half and head_dim % 8 == 0 and head_dim <= _WIDEST_HEAD


def variable_length_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return causal attention [query tokens, heads, head_dim] of many sequences by one call of torch's flash kernel.

    The kernel is made for no shape in particular. The last query of a sequence is at its last key.

    Args:
        query: [query tokens, heads, head_dim], sequence after sequence.
        key: [key tokens, groups, head_dim], sequence after sequence.
        value: the same.
        query_ends: int32 [sequences + 1], where the queries of each sequence begin, and where those of the last one end.
        key_ends: the same of keys.
        longest_query: queries of the longest sequence, or more.
        longest_key: keys of the sequence that has most, or more.
        scale: multiplies scores; 1 / sqrt(head_dim) when not given.
        window: the most tokens that a token sees, itself among them; all before it when not given.
    """
    more: dict[str, Any] = {}
    if TELLS_GROUPS:
        more["enable_gqa"] = query.size(1) != key.size(-2)
    output: Any = varlen.varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        query_ends,
        key_ends,
        longest_query,
        longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **more,
    )
    attended: Tensor = output
    return attended


def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """Put the sink before the keys, with a dimension of its own in which queries have its score.

    So kernels that know of no sinks compute them, and their gradients, without the scores of all pairs of tokens in memory.
    """
    dim = query.shape[-1]
    scale = scale or dim**-0.5
    scores = (sinks / scale).to(query.dtype).view(query.shape[-3], -1, 1).expand(*query.shape[:-1], 1)
    query = torch.cat((query, F.pad(scores, (0, _EXTRA - 1))), dim=-1)
    key, value = (F.pad(x, (0, _EXTRA, 1, 0)) for x in (key, value))
    key[..., 0, dim] = 1
    if is_causal:  # with a query of the sink's own, whose result is dropped
        query = F.pad(query, (0, 0, 1, 0))
        return dot_product_attention(query, key, value, is_causal=True, scale=scale, **options)[..., 1:, :dim]
    mask = attn_mask
    if isinstance(mask, CausalBias):
        mask = causal_lower_right(query.shape[-2], key.shape[-2])
    elif mask is not None:
        mask = F.pad(mask, (1, 0), value=mask.dtype == torch.bool)
    return dot_product_attention(query, key, value, attn_mask=mask, scale=scale, **options)[..., :dim]
