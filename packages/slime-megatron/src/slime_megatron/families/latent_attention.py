"""Multi-head latent attention over packed sequences: keys and values are made of one latent vector a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.family.families.latent_attention.rules import LatentArchitecture
from torch import Tensor

from slime_megatron.batch.packing import PackedSequences
from slime_megatron.model.layers.attention import PackedAttention, rotated
from slime_megatron.model.layers.norm import RMSNorm
from slime_megatron.model.layers.replicated_linear import ReplicatedLinear


class LatentCoreAttention(PackedAttention):
    """`PackedAttention` of queries and keys that are rotated already, and of values of another width.

    The narrower ones are padded with zeros, which change neither scores nor what the others give: torch's fast kernels want one
    width, and context-parallel ranks gather keys and values as one tensor.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Return [t, heads * v_dim] of query and key [t, heads, qk_dim] and value [t, heads, v_dim]."""
        v_dim = value.size(-1)
        query, key, value = of_one_width(query, key, value)
        attended: Tensor = super().forward(query, key, value, attention_mask, **kwargs)
        trimmed: Tensor = attended.unflatten(-1, (-1, value.size(-1)))[..., :v_dim].flatten(1)
        return trimmed

    def _rotate(self, x: Tensor, packed: PackedSequences) -> Tensor:
        return x


def of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads [..., width] of one width, the narrower ones padded with zeros."""
    width = max(key.size(-1), value.size(-1))
    query, key, value = (F.pad(x, (0, width - x.size(-1))) for x in (query, key, value))
    return query, key, value


@dataclass
class LatentAttentionSubmodules:
    """What a `LatentAttention` is built of."""

    column: Any = ColumnParallelLinear
    """Projections to heads, which tensor parallelism cuts."""
    row: Any = RowParallelLinear
    """The output projection."""
    norm: Any = RMSNorm
    """Norms of latent vectors."""
    core_attention: Any = LatentCoreAttention
    """Attention of all heads."""


class LatentAttention(MegatronModule):
    """Latent attention; its weights have the names of Megatron's `MLASelfAttention`.

    That one is not used: it rotates by `cu_seqlens`, which is wrong where samples share tokens, in a host loop over the
    sequences, and cuts the projections to latent vectors (see `ReplicatedLinear`).

    Args:
        config: the model's.
        submodules: what it is built of.
        architecture: of the model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentAttentionSubmodules,
        *,
        architecture: LatentArchitecture,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        a = self._architecture = architecture
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._recomputes = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        common: dict[str, Any] = {"config": config, "is_expert": False, "tp_group": self._tp_group}
        heads = common | {"init_method": config.init_method, "bias": False, "gather_output": False}
        if a.q_lora_rank is None:
            self.linear_q_proj = submodules.column(a.hidden_size, a.query_size, **heads)
        else:
            self.linear_q_down_proj = ReplicatedLinear(a.hidden_size, a.q_lora_rank, config)
            self.q_layernorm = submodules.norm(config, a.q_lora_rank, eps=a.latent_norm_epsilon)
            self.linear_q_up_proj = submodules.column(a.q_lora_rank, a.query_size, **heads)
        self.linear_kv_down_proj = ReplicatedLinear(a.hidden_size, a.latent_size, config)
        self.kv_layernorm = submodules.norm(config, a.kv_lora_rank, eps=a.latent_norm_epsilon)
        self.linear_kv_up_proj = submodules.column(a.kv_lora_rank, a.expanded_size, **heads)
        self.core_attention = submodules.core_attention(config, softmax_scale=a.softmax_scale)
        self.linear_proj = submodules.row(
            a.value_size,
            a.hidden_size,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return [t, 1, hidden_size] of hidden states [t, 1, hidden_size], and no bias; of this rank's tokens of t, where it has some."""

        latent = self._query_latent(hidden_states)
        index = self._index(hidden_states, latent, packed_seq_params)

        def attend(*qkv: Tensor) -> Tensor:
            out: Tensor = self.core_attention(*qkv, *index, packed_seq_params=packed_seq_params)
            return out

        query = self._queries(latent, packed_seq_params)
        key, value = self._keys_and_values(hidden_states, packed_seq_params)
        if self._recomputes and self.training:
            attended = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            attended = attend(query, key, value)
        projected, bias = self.linear_proj(attended[:, None])
        return projected, bias

    def _index(self, hidden_states: Tensor, latent: Tensor, packed: PackedSequences) -> tuple[Any, ...]:
        """Return what `core_attention` gets beside queries, keys and values."""
        return ()

    def _query_latent(self, hidden_states: Tensor) -> Tensor:
        """Return what queries are made of, [t, 1, ...] of this rank's tokens."""
        if self._architecture.q_lora_rank is None:
            return hidden_states
        normed: Tensor = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        return normed

    def _queries(self, latent: Tensor, packed: PackedSequences) -> Tensor:
        """Return rotated queries [t, heads, head_dim] of this rank's heads."""
        if self._architecture.q_lora_rank is None:
            query, _ = self.linear_q_proj(latent)
        else:
            query, _ = self.linear_q_up_proj(latent)
        plain, turned = self._split(query.squeeze(1), self._architecture.head_dim)
        return torch.cat((plain, self._rotated(turned, packed)), dim=-1)

    def _keys_and_values(self, hidden_states: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
        """Return rotated keys [t, heads, head_dim] and values [t, heads, v_head_dim] of this rank's heads."""
        a = self._architecture
        both, _ = self.linear_kv_down_proj(hidden_states)
        latent, turned = both.split((a.kv_lora_rank, a.qk_rope_head_dim), dim=-1)
        if self.config.sequence_parallel:  # its backward pass adds up what all ranks' heads say of it
            turned = tensor_parallel.gather_from_sequence_parallel_region(turned, group=self._tp_group)
        expanded, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        plain, value = self._split(expanded.squeeze(1), a.qk_nope_head_dim + a.v_head_dim)
        shared = self._rotated(turned, packed).expand(-1, plain.size(1), -1)
        return torch.cat((plain, shared), dim=-1), value

    def _split(self, heads: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Divide heads [t, heads * width] after their dimensions that are not rotated."""
        plain = self._architecture.qk_nope_head_dim
        first, second = heads.unflatten(-1, (-1, width)).split((plain, width - plain), dim=-1)
        return first, second

    def _rotated(self, x: Tensor, packed: PackedSequences) -> Tensor:
        assert packed.cos is not None and packed.sin is not None
        return rotated(x, packed.cos, packed.sin, interleaved=self.config.rotary_interleaved)
