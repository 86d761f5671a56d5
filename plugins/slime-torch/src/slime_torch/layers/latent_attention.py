"""Latent attention: what is kept of a token is one vector, of which all heads' keys and values are made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from slime_core.errors import EngineError
from slime_models.attention import dot_product_attention
from slime_models.cpu import product
from slime_models.family.families.latent_attention.rules import LatentArchitecture
from slime_models.family.rotary import half_tables
from torch import Tensor
from torch.nn import functional as F

from slime_torch.layers.batch import Batch, PromptRun
from slime_torch.layers.builder import Builder
from slime_torch.storage.cache import KvCache

#: Numbers of two bytes in what the cache copies at once.
_NUMBERS_OF_A_WORD = 4
#: Of each token what rates others, and the key by which it is rated itself.
Index = tuple[Tensor, Tensor]


class LatentKind:
    """What all layers of a model with latent attention share.

    Args:
        builder: of the model.
        architecture: its numbers.

    Raises:
        EngineError: what is kept of a token does not fill whole words of the cache.
    """

    def __init__(self, builder: Builder, architecture: LatentArchitecture) -> None:
        self.architecture = architecture
        if self.kept_size % _NUMBERS_OF_A_WORD:
            raise EngineError(
                f"kv_lora_rank + qk_rope_head_dim (and index_head_dim): found {self.kept_size}; wanted a multiple of "
                f"{_NUMBERS_OF_A_WORD}: the torch engine's cache copies words; choose another --rollout-engine"
            )
        tables = half_tables(architecture, builder.max_length)
        self._cosine, self._sine = (each.to(builder.device, builder.dtype) for each in tables)
        self._dtype, self._device = builder.attention_dtype, builder.device
        self._n_layers = 0

    @property
    def kept_size(self) -> int:
        """Numbers that are kept of a token."""
        return self.architecture.latent_size

    def join(self) -> int:
        """Return the index of one more layer."""
        self._n_layers += 1
        return self._n_layers - 1

    def create_store(self, *, page_len: int, dtype: torch.dtype | None = None) -> KvCache:
        """Return an empty store: of each position the normed latent vector, then the rotated key that all heads share."""
        return KvCache(
            self._n_layers,
            planes=1,
            heads=1,
            dim=self.kept_size,
            page_len=page_len,
            dtype=dtype or self._dtype,
            device=self._device,
        )

    def begin(self, batch: Batch, store: KvCache) -> LatentPass:
        """Begin a pass."""
        tables = self._cosine[batch.positions, None], self._sine[batch.positions, None]
        return LatentPass(batch, store, tables, interleaved=self.architecture.rotary_interleaved)


class LatentPass:
    """A forward pass over the tokens of `batch`.

    Args:
        batch: the tokens.
        store: of the kind's layers.
        tables: cosine and sine [tokens, 1, qk_rope_head_dim / 2].
        interleaved: whether rotated dimensions are pairs of neighbours, and not of both halves.
    """

    def __init__(
        self, batch: Batch, store: KvCache, tables: tuple[Tensor, Tensor], *, interleaved: bool
    ) -> None:
        self.batch, self.store = batch, store
        self._cosine, self._sine = tables
        self._interleaved = interleaved
        self._rows = store.rows(batch.page, batch.inside)

    def rotated(self, x: Tensor, *, interleaved: bool | None = None) -> Tensor:
        """Return x [tokens, heads, qk_rope_head_dim] rotated; the first of all pairs come before the second ones.

        `interleaved` is that of the model's heads when not given.
        """
        if self._interleaved if interleaved is None else interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, dim=-1)
        turned = first * self._cosine - second * self._sine, second * self._cosine + first * self._sine
        return torch.cat(turned, dim=-1)

    def keep(self, layer: int, kept: Tensor) -> None:
        """Store [tokens, kept_size] of a layer."""
        self.store.write(layer, self._rows, kept[:, None].to(self.store.dtype).contiguous())

    def kept(self, layer: int) -> Tensor:
        """Return what is stored of each token's slot, [tokens, 1, most held, kept_size]; when decoding."""
        (latents,) = self.store.gathered(layer, self.batch.pages)
        return latents

    @cached_property
    def mask(self) -> Tensor:
        """What hides positions past each token's own: 0 or -inf, [tokens, 1, 1, most held]; when decoding."""
        return self.hiding(~self.seen[:, None])

    @cached_property
    def seen(self) -> Tensor:
        """Bool [tokens, 1, most held]: positions up to each token's own; when decoding."""
        at = torch.arange(self.batch.most_held, device=self.batch.positions.device)
        return (at <= self.batch.positions[:, None])[:, None]

    def hiding(self, hidden: Tensor) -> Tensor:
        """Return -inf where `hidden` is set, and 0 elsewhere."""
        mask = torch.zeros(hidden.shape, device=hidden.device, dtype=self.store.dtype)
        return mask.masked_fill_(hidden, -torch.inf)


class LatentAttentionPart:
    """The part. Prompts are computed with all heads' keys and values; when decoding, heads attend to the latent vectors themselves:
    the projections from these to keys and values are applied to queries before, and to what was attended to after
    ("absorbed"; arXiv 2405.04434, section 2.1.2).

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.self_attn.`.
        kind: that all layers share.
    """

    def __init__(self, builder: Builder, prefix: str, kind: LatentKind) -> None:
        a = self._architecture = kind.architecture
        self.kind, self.index = kind, kind.join()
        self._dtype = builder.attention_dtype
        self._query_down = self._query_norm = None
        if a.q_lora_rank is None:
            self._query = builder.matrix(f"{prefix}q_proj.weight")
        else:
            self._query_down = builder.matrix(f"{prefix}q_a_proj.weight")
            self._query_norm = builder.norm(f"{prefix}q_a_layernorm.weight", epsilon=a.latent_norm_epsilon)
            self._query = builder.matrix(f"{prefix}q_b_proj.weight")
        self._down = builder.matrix(f"{prefix}kv_a_proj_with_mqa.weight")
        self._norm = builder.norm(f"{prefix}kv_a_layernorm.weight", epsilon=a.latent_norm_epsilon)
        self._up = builder.tensor(f"{prefix}kv_b_proj.weight")
        self._output = builder.matrix(f"{prefix}o_proj.weight")

    def mix(self, x: Tensor, now: LatentPass) -> Tensor:
        """Return what the heads attend to, [tokens, heads * v_head_dim]."""
        a = self._architecture
        latent, turned = self._down.linear(x).split((a.kv_lora_rank, a.qk_rope_head_dim), dim=-1)
        latent, turned = self._norm(latent), now.rotated(turned[:, None])
        hidden = x
        if self._query_down is not None and self._query_norm is not None:
            x = self._query_norm(self._query_down.linear(x))
        index = self._rate(hidden, x, now)
        now.keep(
            self.index, torch.cat((latent, turned.squeeze(1), *(() if index is None else index[1:])), dim=-1)
        )
        plain, rest = (
            self._query.linear(x)
            .unflatten(-1, (-1, a.head_dim))
            .split((a.qk_nope_head_dim, a.qk_rope_head_dim), dim=-1)
        )
        query = plain, now.rotated(rest)
        if now.batch.prompts is None:
            return self._decode(query, now, index)
        return self._prefill(query, latent, turned, now.batch.prompts.runs, index)

    def _rate(self, hidden: Tensor, latent: Tensor, now: LatentPass) -> Index | None:
        """Return what chooses the tokens that are seen, of normed tokens and the latent vectors of queries; all are when None."""
        return None

    def _chosen(self, index: Index, keys: Tensor, causal: Tensor) -> Tensor | None:
        """Return bool [b, 1, l, m], which of the keys each token sees; all that are `causal` when None."""
        return None

    def project(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        """Return the output projection of rows, plus `residual` if it is given."""
        return self._output.linear(mixed, then="none" if residual is None else "add", other=residual)

    def _prefill(
        self,
        query: tuple[Tensor, Tensor],
        latent: Tensor,
        turned: Tensor,
        runs: Sequence[PromptRun],
        index: Index | None,
    ) -> Tensor:
        a = self._architecture
        expanded = product(latent, self._up.tensor.t()).unflatten(-1, (a.num_attention_heads, -1))
        plain, value = expanded.split((a.qk_nope_head_dim, a.v_head_dim), dim=-1)
        key = torch.cat((plain, turned.expand(-1, a.num_attention_heads, -1)), dim=-1)
        width = max(a.head_dim, a.v_head_dim)  # torch's fast kernels want one
        heads = [
            F.pad(each, (0, width - each.size(-1))).to(self._dtype)
            for each in (torch.cat(query, -1), key, value)
        ]
        attended = []
        for run in runs:
            q, k, v = (
                each[run.tokens].view(run.prompts, run.length, -1, width).transpose(1, 2) for each in heads
            )
            seen = None
            if index is not None:
                rated, keys = (x[run.tokens].unflatten(0, (run.prompts, run.length)) for x in index)
                causal = torch.ones(1, run.length, run.length, dtype=torch.bool, device=k.device).tril_()
                seen = self._chosen((rated, keys), keys, causal)
            out = dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, scale=a.softmax_scale
            )
            attended.append(out[..., : a.v_head_dim].transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(attended).to(latent.dtype)

    def _decode(self, query: tuple[Tensor, Tensor], now: LatentPass, index: Index | None) -> Tensor:
        a = self._architecture
        up = self._up.tensor.view(a.num_attention_heads, -1, a.kv_lora_rank)
        to_keys, to_values = up.split((a.qk_nope_head_dim, a.v_head_dim), dim=1)
        plain, rest = query
        absorbed = product(plain.transpose(0, 1), to_keys).transpose(0, 1)
        kept, mask = now.kept(self.index), now.mask
        if index is not None:
            rated = (index[0][:, None], index[1][:, None])
            seen = self._chosen(rated, kept[:, 0, :, a.latent_size :], now.seen)
            mask = mask if seen is None else now.hiding(~seen)
            kept = kept[..., : a.latent_size]
        heads = torch.cat((absorbed, rest), dim=-1)[:, None].to(
            kept.dtype
        )  # one head of keys: queries are its rows
        attended = dot_product_attention(heads, kept, kept, attn_mask=mask, scale=a.softmax_scale)
        latents = attended[:, 0, :, : a.kv_lora_rank].to(plain.dtype).transpose(0, 1)
        return product(latents, to_values.transpose(1, 2)).transpose(0, 1).flatten(1)
