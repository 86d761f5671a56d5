"""`GatedDeltaNet`: a linear-attention layer in the place of Megatron's self attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from slime_models.delta_rule import causal_convolution, gated_delta_rule
from slime_models.family.families.delta_net import DeltaNetArchitecture
from torch import Tensor
from torch.nn import Parameter

from slime_megatron.batch.packing import PackedSequences
from slime_megatron.families.recurrence import State, recur
from slime_megatron.model.layers.norm import RMSNorm

#: Parameters of which tensor-parallel ranks have the rows of their key heads.
_CUT = ("conv_weight", "dt_bias", "A_log")


class GatedDeltaNet(MegatronModule):
    """Projection, convolution, gated delta rule, gated norm, projection; tensor-parallel ranks share the key heads out.

    Source: arXiv 2412.06464, figure 1; names and order of the parameters are those of `slime_models.family.families.delta_net`.

    Args:
        config: Megatron's.
        architecture: of the model.
        pg_collection: the process groups of this rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        architecture: DeltaNetArchitecture,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        a, self._ranks = architecture, pg_collection.tp
        share = self._ranks.size()
        self._heads, self._repeats = (
            a.linear_num_key_heads // share,
            a.linear_num_value_heads // a.linear_num_key_heads,
        )
        self._key_dim, self._value_dim = a.linear_key_head_dim, a.linear_value_head_dim
        linear: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "is_expert": False,
            "tp_group": self._ranks,
        }
        self.linear_qkv = ColumnParallelLinear(
            a.hidden_size, a.linear_in_size, gather_output=False, skip_bias_add=False, **linear
        )
        self.linear_proj = RowParallelLinear(
            a.linear_value_size, a.hidden_size, input_is_parallel=True, skip_bias_add=True, **linear
        )
        for name, shape in (
            ("conv_weight", (a.linear_qkv_size // share, 1, a.linear_conv_kernel_dim)),
            ("dt_bias", (a.linear_num_value_heads // share,)),
            ("A_log", (a.linear_num_value_heads // share,)),
        ):
            parameter = Parameter(torch.empty(shape, dtype=config.params_dtype))
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            self.register_parameter(name, parameter)
        self.out_norm = RMSNorm(config, self._value_dim, eps=config.layernorm_epsilon)
        self.out_norm.weight.sequence_parallel = False  # type: ignore[attr-defined]  # its gradient is added up below

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedSequences, **__: Any
    ) -> tuple[Tensor, None]:
        """Return (outputs, no bias) of hidden states, both [t, 1, hidden_size], this rank's tokens under sequence parallelism."""
        mixed = self.linear_qkv(hidden_states)[0].squeeze(1).unflatten(-1, (self._heads, -1))
        values = self._repeats * self._value_dim
        channels, gate, beta, decay = mixed.split(
            (2 * self._key_dim + values, values, self._repeats, self._repeats), dim=-1
        )
        decay = F.softplus(decay.flatten(1).float() + self.dt_bias.float()) * -self.A_log.float().exp()
        inputs = (channels.flatten(1), beta.flatten(1).sigmoid(), decay)
        read = recur(inputs, packed_seq_params, self._recurrence)
        out = self._gated_norm(read, gate.reshape(read.shape))
        projected, _bias = self.linear_proj(out.flatten(1)[:, None])
        return projected, None

    def _recurrence(
        self, inputs: Sequence[Tensor], real: Tensor, before: State | None
    ) -> tuple[Tensor, State]:
        """Return what tokens read [batch, tokens, value heads, value width], and the states after them."""
        channels, beta, decay = inputs
        seen = self.conv_weight.size(-1) - 1
        earlier = (
            channels.new_zeros(len(channels), seen, channels.size(-1)) if before is None else before.inputs
        )
        mixed = causal_convolution(channels, self.conv_weight, earlier).unflatten(-1, (self._heads, -1))
        query, key, value = mixed.split(
            (self._key_dim, self._key_dim, self._repeats * self._value_dim), dim=-1
        )
        out, memory = gated_delta_rule(
            query,
            key,
            value.reshape(*value.shape[:2], -1, self._value_dim),
            log_decay=decay * real[..., None],
            beta=beta * real[..., None],
            state=None if before is None else before.memory,
        )
        last = real.sum(1, keepdim=True) + torch.arange(seen, device=real.device)
        rows = torch.arange(len(channels), device=real.device)[:, None]
        return out, State(torch.cat((earlier, channels), dim=1)[rows, last], memory)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the norm of each head's outputs [t, value heads, value width], times silu of the gates."""
        # Each rank has the gradient of its heads, with and without sequence parallelism.
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self._ranks)
        normed = weight * F.rms_norm(x.float(), (self._value_dim,), None, self.out_norm.eps).to(x.dtype)
        gated: Tensor = (normed * F.silu(gate.float())).to(x.dtype)
        return gated

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the parts of Megatron's checkpoint: modules say theirs, and parameters of this one are cut by rows."""
        found: ShardedStateDict = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {name: getattr(self, name) for name in _CUT}
        groups = {"tp_group": self._ranks, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        cut = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(_CUT, 0), sharded_offsets, **groups
        )
        return found | cut
