"""What a layer does between its two products with heads: their norm and rotation, the cache's writes, and attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from slime_models.attention import dot_product_attention
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_torch.layers.batch import Run
from slime_torch.layers.norm import Norm
from slime_torch.layers.rope import rotate_
from slime_torch.storage.cache import KvCache
from slime_torch.storage.weights import Fused

#: Of each layer: the norms of query and key heads, where the model has them.
HeadNorms = Sequence[tuple[Norm, Norm] | None]


class HeadsPass(Protocol):
    """One forward pass over tokens whose positions and slots are known."""

    def place(self, layer: int, heads: Tensor) -> None:
        """Normalise and rotate query and key heads in place, and store keys and values in the cache.

        Args:
            layer: index among those of the kind.
            heads: [tokens, heads + 2 * kv_heads, head_dim]: queries, keys, values; of the model's dtype, contiguous.
        """

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return the attention [tokens, heads * head_dim] of each token to those of its sequence up to itself.

        `heads` are those that were placed.
        """


class HeadsAttention(Protocol):
    """A way to compute it when decoding; its `attend` reads what each token's slot holds, token i that of slot i."""

    def begin(self, positions: Tensor, slots: Tensor, cache: KvCache) -> HeadsPass:
        """Begin a pass over tokens of these positions in these slots, int64 [tokens] each."""


class TorchAttention:
    """By PyTorch's operators.

    Args:
        architecture: the model's numbers.
        tables: cosine and signed sine [positions, head_dim].
        norms: of heads.
        scale: multiplies scores; the root of the inverse of the heads' width when not given.
        window: tokens that each one sees, itself among them; all earlier ones when not given.
        sinks: of each layer, the sinks of its heads [heads], if it has any; see `dot_product_attention`.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        tables: tuple[Tensor, Tensor],
        norms: HeadNorms,
        scale: float | None = None,
        window: int | None = None,
        sinks: Sequence[Fused] | None = None,
    ) -> None:
        self.architecture, self.tables, self.norms = architecture, tables, norms
        self.scale, self.window, self._sinks = scale, window, sinks

    def sinks(self, layer: int) -> Tensor | None:
        """Return the sinks of a layer, if it has any."""
        return None if self._sinks is None else self._sinks[layer].tensor

    def begin(self, positions: Tensor, slots: Tensor, cache: KvCache) -> HeadsPass:
        """Begin a pass."""
        return _TorchPass(self, positions, slots, cache)


class _TorchPass:
    def __init__(self, owner: TorchAttention, positions: Tensor, slots: Tensor, cache: KvCache) -> None:
        self._n_query, self._norms = owner.architecture.num_attention_heads, owner.norms
        self._n_turned = self._n_query + owner.architecture.num_query_groups
        self._cosine, self._sine = (table[positions].unsqueeze(1) for table in owner.tables)
        self._positions, self._cache, self._rows = positions, cache, cache.rows(slots, positions)
        self._scale, self._window, self._sinks = owner.scale, owner.window, owner.sinks

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
        sinks = self._sinks(layer)
        attended = dot_product_attention(
            queries.reshape(shape),
            keys,
            values,
            attn_mask=self._mask,
            scale=self._scale,
            enable_gqa=as_heads,
            sinks=None if sinks is None else sinks.view(shape[1:3]),
        )
        return attended.reshape(n, -1).to(heads.dtype)

    @cached_property
    def _mask(self) -> Tensor:
        """What hides positions past each token's own, or before its window: 0 or -inf, [tokens, 1, 1, capacity]."""
        at = torch.arange(self._cache.capacity, device=self._positions.device)
        own = self._positions[:, None]
        seen = at <= own
        if self._window is not None:
            seen &= at > own - self._window
        mask = torch.zeros(seen.shape, device=at.device, dtype=self._cache.dtype)
        return mask.masked_fill_(~seen, -torch.inf)[:, None, None]


class PrefillPass:
    """Whole prompts: what is placed is placed by `decoding`, and attention is among the prompt's own tokens.

    Args:
        decoding: a pass over the same tokens.
        runs: the prompts.
        owner: the kind's numbers.
        dtype: that attention is computed in.
    """

    def __init__(
        self, decoding: HeadsPass, runs: Sequence[Run], owner: TorchAttention, *, dtype: torch.dtype
    ) -> None:
        self.place = decoding.place
        a = owner.architecture
        self._parts = [a.num_attention_heads, a.num_query_groups, a.num_query_groups]
        self._runs, self._dim, self._dtype = runs, a.head_dim, dtype
        self._scale, self._window, self._sinks = owner.scale, owner.window, owner.sinks

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return the attention [tokens, heads * head_dim] of each token to those of its prompt up to itself."""
        wide, attended = heads.to(self._dtype), []
        for run in self._runs:
            tokens = wide[run.tokens].view(run.prompts, run.length, -1, self._dim).transpose(1, 2)
            q, k, v = torch.split(tokens, self._parts, dim=1)
            mask = self._band(run.length)
            out = dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._scale,
                enable_gqa=True,
                sinks=self._sinks(layer),
            )
            attended.append(out.transpose(1, 2).reshape(run.prompts * run.length, -1))
        return torch.cat(attended).to(heads.dtype)

    def _band(self, length: int) -> Tensor | None:
        """Return which tokens see which [length, length]; None where no window hides any."""
        if self._window is None or length <= self._window:
            return None
        device = self._runs[0].slots.device
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        return seen.tril_().triu_(1 - self._window)
