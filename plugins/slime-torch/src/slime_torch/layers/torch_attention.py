"""What a layer does between its two products with heads: their norm and rotation, the cache's writes, and attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from slime_models.attention import dot_product_attention, fits_variable_lengths, variable_length_attention
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_torch.layers.batch import Batch, Prompts
from slime_torch.layers.norm import Norm
from slime_torch.layers.rope import rotate_
from slime_torch.storage.cache import KvCache
from slime_torch.storage.weights import Fused

#: Of each layer: the norms of query and key heads, of one epsilon, where the model has them.
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

    def begin(self, batch: Batch, cache: KvCache) -> HeadsPass:
        """Begin a pass over tokens. The cache keeps its size until it is over."""


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

    def begin(self, batch: Batch, cache: KvCache) -> HeadsPass:
        """Begin a pass."""
        return _TorchPass(self, batch, cache)

    def computes_at_once(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether one call of the kernel for variable lengths attends to all prompts."""
        takes = fits_variable_lengths(self.architecture.head_dim, dtype)
        return device.type == "cuda" and takes and self._sinks is None


class _TorchPass:
    def __init__(self, owner: TorchAttention, batch: Batch, cache: KvCache) -> None:
        self._owner, self._batch, self._cache = owner, batch, cache
        self._n_query = owner.architecture.num_attention_heads
        self._n_turned = self._n_query + owner.architecture.num_query_groups
        self._cosine, self._sine = (table[batch.positions].unsqueeze(1) for table in owner.tables)
        self._rows = cache.rows(batch.page, batch.inside)

    def place(self, layer: int, heads: Tensor) -> None:
        norms = self._owner.norms[layer]
        if norms is not None:
            spans = heads[:, : self._n_query], heads[:, self._n_query : self._n_turned]
            for norm, span in zip(norms, spans, strict=True):
                span.copy_(norm(span))
        rotate_(heads[:, : self._n_turned], self._cosine, self._sine)
        stored = heads[:, self._n_query :].to(self._cache.dtype).contiguous()
        self._cache.write(layer, self._rows, stored)

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        owner, batch, n = self._owner, self._batch, len(heads)
        queries = heads[:, : self._n_query].to(self._cache.dtype)
        keys, values = self._cache.gathered(layer, batch.pages)
        kv_heads = keys.shape[1]
        # The queries that share a key are so many heads, or so many rows of one head: on a CPU the first is faster
        # (measured: 193 instead of 325 us a layer for 64 rows of 32 positions); CUDA has no fast kernel for it with a mask.
        as_heads = heads.device.type == "cpu"
        shape = (n, self._n_query, 1, -1) if as_heads else (n, kv_heads, self._n_query // kv_heads, -1)
        sinks = owner.sinks(layer)
        attended = dot_product_attention(
            queries.reshape(shape),
            keys,
            values,
            attn_mask=self._mask,
            scale=owner.scale,
            enable_gqa=as_heads,
            sinks=None if sinks is None else sinks.view(shape[1:3]),
        )
        return attended.reshape(n, -1).to(heads.dtype)

    @cached_property
    def _mask(self) -> Tensor:
        """What hides positions past each token's own, or before its window: 0 or -inf, [tokens, 1, 1, most held]."""
        at = torch.arange(self._batch.most_held, device=self._batch.positions.device)
        own = self._batch.positions[:, None]
        seen = at <= own
        if self._owner.window is not None:
            seen &= at > own - self._owner.window
        mask = torch.zeros(seen.shape, device=at.device, dtype=self._cache.dtype)
        return mask.masked_fill_(~seen, -torch.inf)[:, None, None]


class PrefillPass:
    """Whole prompts: what is placed is placed by `decoding`, and attention is among the prompt's own tokens.

    Args:
        decoding: a pass over the same tokens.
        prompts: which tokens are whose.
        owner: the kind's numbers.
        dtype: that attention is computed in.
    """

    def __init__(
        self, decoding: HeadsPass, prompts: Prompts, owner: TorchAttention, *, dtype: torch.dtype
    ) -> None:
        self.place = decoding.place
        a = owner.architecture
        self._parts = [a.num_attention_heads, a.num_query_groups, a.num_query_groups]
        self._prompts, self._dim, self._dtype, self._owner = prompts, a.head_dim, dtype, owner

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return the attention [tokens, heads * head_dim] of each token to those of its prompt up to itself."""
        wide, owner = heads.to(self._dtype), self._owner
        if owner.computes_at_once(self._dtype, heads.device):
            ends, longest = self._prompts.ends, self._prompts.longest
            at_once = variable_length_attention(
                *torch.split(wide, self._parts, dim=1),
                query_ends=ends,
                key_ends=ends,
                longest_query=longest,
                longest_key=longest,
                scale=owner.scale,
                window=owner.window,
            )
            return at_once.flatten(1).to(heads.dtype)
        attended = []
        for run in self._prompts.runs:
            tokens = wide[run.tokens].view(run.prompts, run.length, -1, self._dim).transpose(1, 2)
            q, k, v = torch.split(tokens, self._parts, dim=1)
            mask = self._band(run.length, heads.device)
            out = dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=owner.scale,
                enable_gqa=True,
                sinks=owner.sinks(layer),
            )
            attended.append(out.transpose(1, 2).reshape(run.prompts * run.length, -1))
        return torch.cat(attended).to(heads.dtype)

    def _band(self, length: int, device: torch.device) -> Tensor | None:
        """Return which tokens see which [length, length]; None where no window hides any."""
        window = self._owner.window
        if window is None or length <= window:
            return None
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        return seen.tril_().triu_(1 - window)
