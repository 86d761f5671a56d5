"""Attention of query heads that share keys and values in groups: the usual one, with or without a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slime_core.errors import EngineError
from torch import Tensor

from slime_torch.layers.batch import Batch
from slime_torch.layers.builder import Builder
from slime_torch.layers.kernel_attention import KernelAttention
from slime_torch.layers.norm import Norm
from slime_torch.layers.rope import rope_tables, stored_order
from slime_torch.layers.torch_attention import HeadsAttention, HeadsPass, PrefillPass, TorchAttention
from slime_torch.layers.triton_attention import TritonAttention
from slime_torch.storage.cache import KvCache
from slime_torch.storage.weights import Fused


class GroupedQueries:
    """The kind: rotary tables, window and scale of some layers, whose keys and values are in one store.

    Kernels compute it where the builder has them; those of a CPU neither windows nor sinks.

    Args:
        builder: of the model.
        tables: cosine and signed sine [positions, head_dim], as `rope_tables` returns them; the architecture's when not given.
        window: tokens that each one sees, itself among them; all earlier ones when not given.
        scale: multiplies scores; the root of the inverse of `head_dim` when not given.
        has_sinks: whether the softmax of each head has one entry more.
    """

    def __init__(
        self,
        builder: Builder,
        *,
        tables: tuple[Tensor, Tensor] | None = None,
        window: int | None = None,
        scale: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        a = self.architecture = builder.architecture
        cosine, sine = tables or rope_tables(a, builder.max_length)
        rows = cosine.to(builder.device, builder.dtype), sine.to(builder.device, builder.dtype)
        self.order = stored_order(a)
        """Which dimension of a head is stored in each place; None where it is the folder's."""
        self._norms: list[tuple[Norm, Norm] | None] = []
        self._sinks: list[Fused] | None = [] if has_sinks else None
        self._dtype, self._device = builder.attention_dtype, builder.device
        self._torch = TorchAttention(
            a, tables=rows, norms=self._norms, scale=scale, window=window, sinks=self._sinks
        )
        self._decoding: HeadsAttention = self._torch
        self.has_one_shape = builder.has_gpu_kernels
        """Whether a decoding step has shapes that no length changes."""
        if builder.has_gpu_kernels:
            self._decoding = TritonAttention(self._torch)
        self._stored_in = self._dtype
        if builder.has_kernels and window is None and not has_sinks:
            self._decoding = KernelAttention(a, tables=rows, norms=self._norms, scale=scale)
            self._stored_in = builder.dtype

    def join(self, norms: tuple[Norm, Norm] | None, sinks: Fused | None = None) -> int:
        """Return the index of one more layer, whose query and key heads have these norms, and its heads these sinks [heads].

        Raises:
            EngineError: it has sinks, and the kind has none, or the other way round; or its two norms have not the same epsilon.
        """
        if (sinks is None) != (self._sinks is None):
            raise EngineError(
                f"{self.architecture.model_type}: found a layer {'without' if sinks is None else 'with'} sinks; wanted a kind "
                "of attention that says so: has_sinks"
            )
        if norms is not None and norms[0].epsilon != norms[1].epsilon:
            raise EngineError(
                f"{self.architecture.model_type}: found norms of query and key heads with the epsilons {norms[0].epsilon} and "
                f"{norms[1].epsilon}; wanted the same of both, which kernels compute at once"
            )
        if self._sinks is not None and sinks is not None:
            self._sinks.append(sinks)
        self._norms.append(norms)
        return len(self._norms) - 1

    def create_store(self, *, page_len: int, dtype: torch.dtype | None = None) -> KvCache:
        """Return an empty store of its layers."""
        return KvCache(
            len(self._norms),
            heads=self.architecture.num_query_groups,
            dim=self.architecture.head_dim,
            page_len=page_len,
            dtype=dtype or self._stored_in,
            device=self._device,
        )

    def begin(self, batch: Batch, store: KvCache) -> HeadsPass:
        """Begin a pass."""
        decoding = self._decoding.begin(batch, store)
        if batch.prompts is None:
            return decoding
        return PrefillPass(decoding, batch.prompts, self._torch, dtype=self._dtype)


class GroupedQueryAttention:
    """The part: one product for queries, keys and values, and one after attention, each with a bias where the model has it.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.self_attn.`.
        kind: that it shares with other layers.
        norm_offset: added to the weights of the norms of heads, which it has where the model has `q_norm`.

    Raises:
        EngineError: the model lacks a tensor, or has norms of something else than heads.
    """

    def __init__(
        self, builder: Builder, prefix: str, kind: GroupedQueries, *, norm_offset: float = 0.0
    ) -> None:
        weights, biases = ([f"{prefix}{one}_proj.{end}" for one in "qkv"] for end in ("weight", "bias"))
        self._dim = builder.architecture.head_dim
        self.qkv = builder.matrix(*weights, orders=_orders(builder, weights[:2], kind.order))
        self._bias = None
        if builder.has(biases[0]):
            self._bias = builder.tensor(*biases, orders=_orders(builder, biases[:2], kind.order))
        norms = None
        if builder.has(name := f"{prefix}q_norm.weight"):
            if builder.shape(name) != (self._dim,):
                raise EngineError(
                    f"{name}: found the shape {builder.shape(name)}; wanted a norm of heads, {self._dim} wide"
                )
            query, key = (
                builder.norm(f"{prefix}{one}_norm.weight", kind.order, offset=norm_offset) for one in "qk"
            )
            norms = query, key
        sinks = builder.tensor(f"{prefix}sinks") if builder.has(f"{prefix}sinks") else None
        self.kind, self.index = kind, kind.join(norms, sinks)
        self.output = builder.matrix(f"{prefix}o_proj.weight")
        has_bias = builder.has(f"{prefix}o_proj.bias")
        self._output_bias = builder.tensor(f"{prefix}o_proj.bias") if has_bias else None

    def mix(self, x: Tensor, now: HeadsPass) -> Tensor:
        """Return what the heads attend to, [tokens, heads * head_dim]."""
        heads = self.qkv.linear(x, self._bias).view(len(x), -1, self._dim)
        now.place(self.index, heads)
        return now.attend(self.index, heads)

    def project(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        """Return the product after attention, plus `residual`."""
        return self.output.linear(
            mixed, self._output_bias, then="none" if residual is None else "add", other=residual
        )


def _orders(builder: Builder, names: Sequence[str], order: Sequence[int] | None) -> dict[str, list[int]]:
    """Return the order of the rows of tensors that are heads, one after another, of that order each."""
    if order is None:
        return {}
    dim = len(order)
    return {
        name: [first + place for first in range(0, builder.shape(name)[0], dim) for place in order]
        for name in names
    }
