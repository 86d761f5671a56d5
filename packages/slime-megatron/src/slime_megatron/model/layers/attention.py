"""Attention over packed sequences in plain PyTorch: on CUDA one call of variable lengths, else padded batches."""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.attention import dot_product_attention, fits_variable_lengths, variable_length_attention
from slime_models.cpu import attends_in_bfloat16
from slime_models.triton_launch import can_launch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from slime_megatron.batch.packing import PackedSequences, PaddedSegments, PaddingMap
from slime_megatron.batch.variable_lengths import VariableLengths
from slime_megatron.parallel.context_parallel import attend_zigzag

#: Batches of sequences below this length are attended to in float32 on a CPU with matrix units, where torch's bfloat16
#: kernel takes twice as long for 90 tokens, as long for 500, and 15% less for 1,000 (torch 2.14); on another CPU all are.
_FLOAT32_BELOW = 512


class PackedAttention(MegatronModule):
    """Megatron's `core_attention`: rotary embedding and causal attention within each packed sequence.

    On CUDA, in bfloat16 and float16, all sequences are attended to by one call of torch's flash kernel for variable lengths,
    which is made for no shape in particular; whatever follows shared tokens has a copy of their keys and values there. What
    follows is done on a CPU, in float32, and where that kernel does not take the heads or a subclass has an `attend` of its own.

    Sequences of like length are padded on the right to one batch. Causal attention never looks right, so no real
    token sees padding and no mask is needed; what padding itself computes is dropped. One call of
    `scaled_dot_product_attention` a batch instead of one a sequence is 2 to 4 times as fast on a CPU at 90 tokens,
    and saves the host loop on CUDA. Tokens that several sequences share attend to themselves once; what follows them in each
    sequence then attends to their keys and values and to its own, aligned at the last token, and so on down the tree.

    The rotary embedding is applied here, and not by `GPTModel`, because Megatron 0.19.2 applies it to packed
    sequences in a host loop with a device sync for each sequence.

    A family's layers may have a window and rotary angles of their own (`functools.partial` gives them), and other scores, such as
    capped ones, by a subclass with another `attend`; one whose softmax has sinks sets `sinks` [this rank's heads].

    Args:
        config: the model's.
        softmax_scale: scale of the scores; 1 / sqrt(head_dim) when None.
        window: the most tokens that a token sees, itself among them; all before it when None.
        rotary_columns: first and last (not included) column of the rotary tables that are this layer's, where the family's
            tables have those of several kinds of layers side by side; all when None.
    """

    sinks: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        *,
        window: int | None = None,
        rotary_columns: tuple[int, int] | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout != 0.0 or config.window_size is not None:
            raise ValueError("PackedAttention has no dropout, and its window is a parameter of its own")
        self._scale, self._window = softmax_scale, window
        self.register_parameter("sinks", None)
        self._columns = slice(*rotary_columns) if rotary_columns else slice(None)

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
        query, key = (self._rotate(x, packed_seq_params) for x in (query, key))
        packed, padding_map = packed_seq_params, packed_seq_params.padding_map
        if packed.zigzag is not None:
            return attend_zigzag(query, key, value, packed.zigzag, self.attend)
        if packed.lengths is not None and self._fits_one_call(query, value):
            return self._attend_at_once(query, key, value, packed.lengths)
        if padding_map is not None:
            query, key, value = (PadTokens.apply(x, padding_map) for x in (query, key, value))
        sizes = [batch.n_slots for batch in packed.batches]
        qkv = list(zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True))
        outputs: list[Tensor] = []
        whole: list[list[Tensor]] = []  # keys and values of each batch, with those before
        for batch, slots in zip(packed.batches, qkv, strict=True):
            q, *own = (x.unflatten(0, (batch.n_rows, batch.length)) for x in slots)
            if batch.parent is not None:
                own = [_after(before, x, batch) for before, x in zip(whole[batch.parent], own, strict=True)]
            whole.append(own)
            outputs.append(self.attend(q, *own))
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat if padding_map is None else UnpadTokens.apply(flat, padding_map)

    def _rotate(self, x: Tensor, packed: PackedSequences) -> Tensor:
        """Apply the rotary embedding to the first dimensions of each head of x [t, heads, head_dim]."""
        assert packed.cos is not None and packed.sin is not None
        cos, sin = packed.cos[..., self._columns], packed.sin[..., self._columns]
        return rotated(x, cos, sin, interleaved=self.config.rotary_interleaved)

    def _fits_one_call(self, query: Tensor, value: Tensor) -> bool:
        """Return whether torch's kernel for variable lengths computes this attention."""
        return (
            query.size(-1) == value.size(-1)
            and fits_variable_lengths(query.size(-1), query.dtype)
            and self.sinks is None
            and type(self).attend is PackedAttention.attend
        )

    def _attend_at_once(self, query: Tensor, key: Tensor, value: Tensor, lengths: VariableLengths) -> Tensor:
        """Return [t, heads * head_dim] by one call. Copies of shared keys add their gradients up in order of the row."""
        if lengths.key_tokens is not None:
            key, value = key[lengths.key_tokens], value[lengths.key_tokens]
        attended = variable_length_attention(
            query,
            key,
            value,
            query_ends=lengths.query_ends,
            key_ends=lengths.key_ends,
            longest_query=lengths.longest_query,
            longest_key=lengths.longest_key,
            scale=self._scale,
            window=self._window,
        )
        return attended.flatten(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return [b * l, heads * head_dim] of q [b, l, heads, head_dim] and k, v [b, m, groups, head_dim], m >= l.

        Attention is causal, queries and keys being aligned at the last token; or to what is `seen`, bool [b, 1, l, m].
        """
        n_query, n_key, dtype = q.size(1), k.size(1), q.dtype
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        in_float32 = n_key < _FLOAT32_BELOW or not attends_in_bfloat16()
        if q.device.type == "cpu" and q.dtype.itemsize == 2 and in_float32:
            q, k, v = q.float(), k.float(), v.float()
        causal = self._mask(n_query, n_key, q.device) if seen is None else {"attn_mask": seen}
        repeats = q.size(1) // k.size(1)
        if repeats > 1 and q.is_cuda and q.dtype is torch.float32:
            # torch's kernels for float32 on CUDA take no groups; what does would hold the scores of all pairs of tokens.
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        gqa = q.size(1) != k.size(1)
        out = dot_product_attention(q, k, v, **causal, scale=self._scale, enable_gqa=gqa, sinks=self.sinks)
        return out.transpose(1, 2).flatten(0, 1).flatten(1).to(dtype)

    def _mask(self, n_query: int, n_key: int, device: torch.device) -> dict[str, Any]:
        """Return the arguments that hide later tokens, and those before the window."""
        if self._window is None or n_key <= self._window:
            if n_query == n_key:
                return {"is_causal": True}
            return {"attn_mask": causal_lower_right(n_query, n_key)}
        rows = torch.arange(n_key - n_query, n_key, device=device)[:, None]
        behind = rows - torch.arange(n_key, device=device)
        return {"attn_mask": (behind >= 0) & (behind < self._window)}


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Return x [t, heads, head_dim] with the first dimensions of each head rotated: pairs of neighbours, or of both halves.

    Args:
        x: queries or keys.
        cos: [t, 1, rotary_dim], both halves equal.
        sin: the same.
        interleaved: whether neighbours are pairs.
    """
    if can_launch(x.device):
        return cast(Tensor, _Rotated.apply(x, cos, sin, interleaved))
    rotated, rest = x[..., : cos.size(-1)], x[..., cos.size(-1) :]
    if interleaved:
        cos, sin = (table.chunk(2, dim=-1)[0] for table in (cos, sin))
        left, right = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1).flatten(-2)
    else:
        left, right = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-right, left), dim=-1) * sin
    return rotated if rest.size(-1) == 0 else torch.cat((rotated, rest), dim=-1)


class _Rotated(torch.autograd.Function):
    """The rotation by one kernel, and back by another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved=interleaved, inverse=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return (
            _rotate(gradient, *ctx.saved_tensors, interleaved=ctx.interleaved, inverse=True),
            None,
            None,
            None,
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool) -> Tensor:
    from slime_megatron.kernels import operators

    x = x if x.stride(-1) == 1 else x.contiguous()
    rotated: Tensor = operators.rotate(x, cos, sin, interleaved, inverse)
    return rotated


def _after(before: Tensor, own: Tensor, batch: PaddedSegments) -> Tensor:
    """Put the keys (or values) that segments follow before their own: [b, before + l, groups, head_dim].

    Args:
        before: [rows, m, groups, head_dim], of the batch that they follow.
        own: [b, l, groups, head_dim], the segments of one row after those of another.
        batch: which rows they are.
    """
    shared = before[batch.first : batch.first + batch.n_parents, : batch.before]
    own = own.unflatten(0, (batch.n_parents, batch.size))
    return torch.cat((shared[:, None].expand(-1, batch.size, -1, -1, -1), own), dim=2).flatten(0, 1)


class PadTokens(torch.autograd.Function):
    """Put tokens into their slots: [t, ...] to [slots, ...]. The gradient of padding is dropped.

    The backward pass selects rows, where autograd's own would add them up one by one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding_map: PaddingMap) -> Tensor:
        """Return the tokens in their slots."""
        ctx.slots = padding_map.slots
        return x.index_select(0, padding_map.tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of tokens."""
        return gradient.index_select(0, ctx.slots), None


class UnpadTokens(torch.autograd.Function):
    """Take the tokens back from their slots: [slots, ...] to [t, ...]. The gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding_map: PaddingMap) -> Tensor:
        """Return the tokens of slots."""
        ctx.slots, ctx.n_slots = padding_map.slots, len(padding_map.tokens)
        return x.index_select(0, padding_map.slots)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of slots."""
        zeros = gradient.new_zeros(ctx.n_slots, *gradient.shape[1:])
        return zeros.index_copy_(0, ctx.slots, gradient), None
