"""Attention over packed sequences, and the norm, in plain PyTorch: the same code on a CPU and on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_megatron.packed import Layout, LengthGroup, PackedSequences

#: Groups of sequences below this length are attended to in float32 on a CPU, where torch's bfloat16 kernel takes
#: twice as long for 90 tokens, as long for 500, and 15% less for 1,000 (torch 2.14).
_FLOAT32_BELOW = 512


class PackedAttention(MegatronModule):
    """Megatron's `core_attention`: rotary embedding and causal attention within each packed sequence.

    Sequences of like length are padded on the right to one batch. Causal attention never looks right, so no real
    token sees padding and no mask is needed; what padding itself computes is dropped. One call of
    `scaled_dot_product_attention` a group instead of one a sequence is 2 to 4 times as fast on a CPU at 90 tokens,
    and saves the host loop on CUDA. A prompt that several sequences share is copied into each of them here, and only
    here: everything else of the model sees its tokens once.

    The rotary embedding is applied here, and not by `GPTModel`, because Megatron 0.19.2 applies it to packed
    sequences in a host loop with a device sync for each sequence.

    Args:
        config: the model's.
        softmax_scale: scale of the scores; 1 / sqrt(head_dim) when None.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        if config.attention_dropout != 0.0 or config.window_size is not None:
            raise ValueError("PackedAttention has neither dropout nor a window; set attention_dropout to 0")
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Return [t, heads * head_dim] of query [t, heads, head_dim], key and value [t, groups, head_dim]."""
        query = _rotate(query, packed_seq_params)
        key = _rotate(key, packed_seq_params)
        layout = packed_seq_params.layout
        if layout is not None:
            query, key, value = (_Spread.apply(x, layout) for x in (query, key, value))
        outputs = [self._attend(query, key, value, group) for group in packed_seq_params.groups]
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat if layout is None else _Collect.apply(flat, layout.slots)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, group: LengthGroup) -> Tensor:
        q, k, v = (
            x[group.start : group.stop].unflatten(0, (group.size, group.length)).transpose(1, 2)
            for x in (query, key, value)
        )
        if query.device.type == "cpu" and group.length < _FLOAT32_BELOW:
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.transpose(1, 2).reshape(group.size * group.length, -1).to(query.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight carries `sequence_parallel`, by which Megatron knows to sum its gradient over ranks.

    Megatron's own wrapper of torch's norm (0.19.2) refuses sequence parallelism for the lack of that mark.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def _rotate(x: Tensor, packed: PackedSequences) -> Tensor:
    """Apply the rotary embedding (halves, not pairs) to x [t, heads, head_dim]."""
    assert packed.cos is not None and packed.sin is not None
    left, right = x.chunk(2, dim=-1)
    return x * packed.cos + torch.cat((-right, left), dim=-1) * packed.sin


class _Spread(torch.autograd.Function):
    """Copy tokens into their slots: [t, ...] to [slots, ...].

    The backward pass sums over a token's slots in a fixed order, which autograd's own (index_add) does not on CUDA,
    and takes rows instead of adding them one by one, which is what that costs on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layout: Layout = ctx.layout
        total = gradient.index_select(0, layout.slots)
        if len(layout.copied):
            n_copied, n_copies = layout.copies.shape
            further = gradient.index_select(0, layout.copies.flatten()).view(n_copied, n_copies, -1)
            further = further.float().mul_(layout.is_copy[..., None]).sum(1)
            mine = total.index_select(0, layout.copied)
            total.index_copy_(0, layout.copied, (mine.flatten(1) + further).to(total.dtype).view_as(mine))
        return total, None


class _Collect(torch.autograd.Function):
    """Take the rows `slots`, which are distinct; the gradient of the other rows is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.rows = x.shape[0]
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.rows, *gradient.shape[1:]).index_copy_(0, slots, gradient), None
