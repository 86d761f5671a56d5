"""Latent attention to the tokens that an indexer chooses (DeepSeek-V3.2, GLM-5)."""

from __future__ import annotations

import torch
from slime_models.family.families.latent_attention.sparse import SparseArchitecture
from slime_models.indexer import NORM_EPSILON, chosen
from torch import Tensor
from torch.nn import functional as F

from slime_torch.layers.builder import Builder
from slime_torch.layers.latent_attention import Index, LatentAttentionPart, LatentKind, LatentPass


class SparseKind(LatentKind):
    """What all layers share. Of a token the indexer's key is kept, too."""

    architecture: SparseArchitecture

    @property
    def kept_size(self) -> int:
        """Numbers that are kept of a token."""
        return self.architecture.latent_size + self.architecture.index_head_dim


class SparseAttentionPart(LatentAttentionPart):
    """The part. The indexer's queries and weights lie side by side, and rate in float32."""

    def __init__(self, builder: Builder, prefix: str, kind: SparseKind) -> None:
        super().__init__(builder, prefix, kind)
        self._sparse = kind.architecture
        own = f"{prefix}indexer."
        self._index_query = builder.matrix(f"{own}wq_b.weight")
        self._index_key = builder.matrix(f"{own}wk.weight")
        self._key_norm, self._key_bias = (builder.tensor(f"{own}k_norm.{end}") for end in ("weight", "bias"))
        self._weights = builder.matrix(f"{own}weights_proj.weight")

    def _rate(self, hidden: Tensor, latent: Tensor, now: LatentPass) -> Index:
        a = self._sparse
        query = self._index_query.linear(latent).unflatten(-1, (a.index_n_heads, -1))
        key = F.layer_norm(
            self._index_key.linear(hidden),
            (a.index_head_dim,),
            self._key_norm.tensor,
            self._key_bias.tensor,
            NORM_EPSILON,
        )
        query, key = (self._turned(x, now) for x in (query, key[:, None]))
        return torch.cat((query.flatten(1), self._weights.linear(hidden)), dim=-1), key.squeeze(1)

    def _chosen(self, index: Index, keys: Tensor, causal: Tensor) -> Tensor | None:
        a = self._sparse
        if keys.size(1) <= a.index_topk:
            return None
        query, weights = index[0].split((a.index_query_size, a.index_n_heads), dim=-1)
        return chosen(query.unflatten(-1, (a.index_n_heads, -1)), keys, weights, causal, most=a.index_topk)

    def _turned(self, x: Tensor, now: LatentPass) -> Tensor:
        """Return x [tokens, heads, index_head_dim] with the first dimensions of each head rotated."""
        width = self._sparse.qk_rope_head_dim
        turned = now.rotated(x[..., :width], interleaved=self._sparse.index_interleaved)
        return torch.cat((turned, x[..., width:]), dim=-1)
