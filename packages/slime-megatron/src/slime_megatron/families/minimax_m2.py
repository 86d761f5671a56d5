"""The layers of MiniMax-M2: queries, and keys, are normalised over all heads together. Imported when a model is built."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_megatron.model.family_layers import FamilyLayers
from slime_megatron.model.layer_spec import layer_spec
from slime_megatron.model.layers.norm import RMSNorm


class AllHeadsNorm(RMSNorm):
    """RMSNorm over all heads of a token's queries, or keys, together. Collective over the tensor-parallel ranks, which share heads.

    Every rank has the weights of all heads: Megatron adds the gradients of norms of queries and keys up over these ranks.

    Args:
        config: the model's.
        hidden_size: of a head.
        eps: epsilon.
        heads: of all ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: int, **_: Any
    ) -> None:
        super().__init__(config, heads * hidden_size, eps)
        self._ranks = parallel_state.get_tensor_model_parallel_group()

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., heads, head_dim], this rank's heads, in its dtype."""
        flat = x.flatten(-2)
        if self._ranks.size() == 1:
            return (
                F.rms_norm(flat.float(), self.normalized_shape, self.weight.float(), self.eps)
                .type_as(x)
                .view_as(x)
            )
        squares = flat.float().square().sum(-1, keepdim=True)
        squares = tensor_parallel.reduce_from_tensor_model_parallel_region(squares)
        squares = tensor_parallel.copy_to_tensor_model_parallel_region(squares)
        own = self.weight.chunk(self._ranks.size())[self._ranks.rank()]
        normed = flat.float() * torch.rsqrt(squares / len(self.weight) + self.eps)
        scaled: Tensor = own.float() * normed
        return scaled.type_as(x).view_as(x)


def minimax_m2_layer(config: TransformerConfig, architecture: Architecture, number: int) -> ModuleSpec:
    """Return slime's layer with norms over all heads."""
    spec = layer_spec(config, architecture, number)
    attention = spec.submodules.self_attention.submodules
    attention.q_layernorm = partial(AllHeadsNorm, heads=architecture.num_attention_heads)
    attention.k_layernorm = partial(AllHeadsNorm, heads=architecture.num_query_groups)
    return spec


LAYERS = FamilyLayers(layer=minimax_m2_layer)
