"""Latent attention to the tokens that an indexer chooses (DeepSeek-V3.2, GLM-5), over packed sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.family.families.latent_attention.sparse import SparseArchitecture
from slime_models.indexer import NORM_EPSILON, chosen
from torch import Tensor

from slime_megatron.batch.packing import PackedSequences
from slime_megatron.families.latent_attention import LatentAttention, LatentAttentionSubmodules, of_one_width
from slime_megatron.model.layers.attention import PackedAttention, rotated
from slime_megatron.model.layers.replicated_linear import ReplicatedLinear


class Indexer(torch.nn.Module):
    """What rates earlier tokens; every tensor-parallel rank has it whole. It has no gradient, and stays as it is."""

    def __init__(self, config: TransformerConfig, architecture: SparseArchitecture) -> None:
        super().__init__()
        a = self._architecture = architecture
        assert a.q_lora_rank is not None
        self._sequence_parallel = config.sequence_parallel
        self.wq_b = ReplicatedLinear(a.q_lora_rank, a.index_query_size, config)
        self.wk = ReplicatedLinear(a.hidden_size, a.index_head_dim, config)
        self.k_norm = torch.nn.LayerNorm(a.index_head_dim, eps=NORM_EPSILON, dtype=config.params_dtype)
        self.weights_proj = ReplicatedLinear(a.hidden_size, a.index_n_heads, config)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, latent: Tensor, packed: PackedSequences
    ) -> tuple[Tensor, Tensor]:
        """Return what `SparseCoreAttention` rates with.

        Args:
            hidden_states: [t, 1, hidden_size]; this rank's part of t under sequence parallelism.
            latent: [t, 1, q_lora_rank], the normed latent vectors of queries.
            packed: the whole row.

        Returns:
            Queries and weights [t, heads * dim + heads], and keys [t, dim], of the whole row.
        """
        a = self._architecture
        query, key = self.wq_b(latent)[0], self.k_norm(self.wk(hidden_states)[0])
        weights, _ = self.weights_proj(hidden_states)
        if self._sequence_parallel:
            query, key, weights = (
                tensor_parallel.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)
                for x in (query, key, weights)
            )
        query = self._rotated(query.squeeze(1).unflatten(-1, (a.index_n_heads, -1)), packed)
        key = self._rotated(key, packed)
        return torch.cat((query.flatten(1), weights.squeeze(1)), dim=-1), key.squeeze(1)

    def _rotated(self, x: Tensor, packed: PackedSequences) -> Tensor:
        assert packed.cos is not None and packed.sin is not None
        return rotated(x, packed.cos, packed.sin, interleaved=self._architecture.index_interleaved)


class SparseCoreAttention(PackedAttention):
    """`PackedAttention` to the tokens that an indexer chooses, of queries and keys that are rotated already.

    What rates travels with queries and keys through padding, shared tokens and context parallelism, as columns after theirs.
    All pairs are computed, and those that were not chosen hidden.
    """

    def __init__(self, config: TransformerConfig, *, architecture: SparseArchitecture, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._architecture = architecture

    def forward(  # type: ignore[override]  # the base has no indexer
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: tuple[Tensor, Tensor],
        *,
        packed_seq_params: PackedSequences,
    ) -> Tensor:
        """Return [t, heads * v_dim] of query and key [t, heads, qk_dim], value [t, heads, v_dim] and what `Indexer` returns."""
        query, key = (
            torch.cat((x.flatten(1), own), dim=-1)[:, None]
            for x, own in zip((query, key), index, strict=True)
        )
        value = value.flatten(1)[:, None]
        if packed_seq_params.zigzag is not None:  # ranks gather keys and values as one tensor
            width = max(key.size(-1), value.size(-1))
            key, value = (F.pad(x, (0, width - x.size(-1))) for x in (key, value))
        attended: Tensor = super().forward(query, key, value, None, packed_seq_params=packed_seq_params)
        return attended

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return [b * l, heads * v_dim] of q [b, l, 1, ...], k and v [b, m, 1, ...]; see `forward` for their columns."""
        a, width = self._architecture, q.size(-1)
        n_heads = (width - a.index_query_size - a.index_n_heads) // a.head_dim
        q, index_query, weights = q[:, :, 0].split(
            (n_heads * a.head_dim, a.index_query_size, a.index_n_heads), dim=-1
        )
        k = k[:, :, 0, : n_heads * a.head_dim + a.index_head_dim]
        k, index_key = k.split((n_heads * a.head_dim, a.index_head_dim), dim=-1)
        v = v[:, :, 0, : n_heads * a.v_head_dim]
        q, k, v = (x.unflatten(-1, (n_heads, -1)) for x in (q, k, v))
        if k.size(1) > a.index_topk:
            heads = index_query.unflatten(-1, (a.index_n_heads, -1))
            places = torch.arange(k.size(1), device=k.device)
            causal = places <= places[k.size(1) - q.size(1) :, None]
            seen = chosen(heads, index_key, weights, causal[None], most=a.index_topk)
        out = super().attend(*of_one_width(q, k, v), seen)
        trimmed: Tensor = out.unflatten(-1, (n_heads, -1))[..., : a.v_head_dim].flatten(1)
        return trimmed

    def _rotate(self, x: Tensor, packed: PackedSequences) -> Tensor:
        return x


class SparseAttention(LatentAttention):
    """Latent attention to the tokens that its indexer chooses."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentAttentionSubmodules,
        *,
        architecture: SparseArchitecture,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, architecture=architecture, **kwargs)
        self.indexer = Indexer(config, architecture)

    def _index(self, hidden_states: Tensor, latent: Tensor, packed: PackedSequences) -> tuple[Any, ...]:
        return (self.indexer(hidden_states, latent, packed),)
