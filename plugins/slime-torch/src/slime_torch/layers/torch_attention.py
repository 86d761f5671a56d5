"""What a layer does between its two products with heads: their norm and rotation, the cache's writes, and attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from slime_models.attention import dot_product_attention
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_torch.storage.cache import KvCache
from slime_torch.layers.norm import Norm
from slime_torch.layers.rope import rotate_

#: Of each layer: the norms of query and key heads, where the model has them.
HeadNorms = Sequence[tuple[Norm, Norm] | None]


class Pass(Protocol):
    """One forward pass over tokens whose positions and slots are known."""

    def place(self, layer: int, heads: Tensor) -> None:
        """Normalise and rotate query and key heads in place, and store keys and values in the cache.

        Args:
            layer: index.
            heads: [tokens, heads + 2 * kv_heads, head_dim]: queries, keys, values; of the model's dtype, contiguous.
        """

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return the attention [tokens, heads * head_dim] of each token to what its slot holds, to its own position.

        Token i must be that of slot i, so for decoding alone. `heads` are those that were placed.
        """


class Attention(Protocol):
    """A way to compute it."""

    def begin(self, positions: Tensor, slots: Tensor, cache: KvCache) -> Pass:
        """Begin a pass over tokens of these positions in these slots, int64 [tokens] each."""


class TorchAttention:
    """By PyTorch's operators.

    Args:
        architecture: the model's numbers.
        tables: cosine and signed sine [positions, head_dim].
        norms: of heads.
    """

    def __init__(
        self, architecture: Architecture, *, tables: tuple[Tensor, Tensor], norms: HeadNorms
    ) -> None:
        self.architecture, self.tables, self.norms = architecture, tables, norms

    def begin(self, positions: Tensor, slots: Tensor, cache: KvCache) -> Pass:
        """Begin a pass."""
        return _TorchPass(self, positions, slots, cache)


class _TorchPass:
    def __init__(self, owner: TorchAttention, positions: Tensor, slots: Tensor, cache: KvCache) -> None:
        self._n_query, self._norms = owner.architecture.num_attention_heads, owner.norms
        self._n_turned = self._n_query + owner.architecture.num_query_groups
        self._cosine, self._sine = (table[positions].unsqueeze(1) for table in owner.tables)
        self._positions, self._cache, self._rows = positions, cache, cache.rows(slots, positions)

    def place(self, layer: int, heads: Tensor) -> None:
        norms = self._norms[layer]
        if norms is not None:
            spans = heads[:, : self._n_query], heads[:, self._n_query : self._n_turned]
            for norm, span in zip(norms, spans, strict=True):
                span.copy_(norm(span))
        rotate_(heads[:, : self._n_turned], self._cosine, self._sine)
        self._cache.write(layer, self._rows, heads[:, self._n_query :].to(self._cache.dtype))

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        keys, values = self._cache.views(len(heads))[layer]
        n, kv_heads = len(heads), keys.shape[1]
        # The queries that share a key are so many heads, or so many rows of one head: on a CPU the first is faster
        # (measured: 193 instead of 325 us a layer for 64 rows of 32 positions); CUDA has no fast kernel for it with a mask.
        as_heads = heads.device.type == "cpu"
        shape = (n, self._n_query, 1, -1) if as_heads else (n, kv_heads, self._n_query // kv_heads, -1)
        queries = heads[:, : self._n_query].to(self._cache.dtype)
        attended = dot_product_attention(
            queries.reshape(shape), keys, values, attn_mask=self._mask, enable_gqa=as_heads
        )
        return attended.reshape(n, -1).to(heads.dtype)

    @cached_property
    def _mask(self) -> Tensor:
        """What hides the positions past each token's own: 0 or -inf, [tokens, 1, 1, capacity]."""
        capacity, device = self._cache.capacity, self._positions.device
        seen = torch.arange(capacity, device=device) <= self._positions[:, None]
        mask = torch.zeros(seen.shape, device=device, dtype=self._cache.dtype)
        return mask.masked_fill_(~seen, -torch.inf)[:, None, None]
