"""The decoder of gpt-oss: windows in some layers, sinks in all, and experts whose weights lie in one tensor each."""

from __future__ import annotations

import torch
from slime_models.family.families.gpt_oss import GptOssArchitecture
from torch import Tensor
from torch.nn import functional as F

from slime_torch.layers.attention import GroupedQueries, GroupedQueryAttention
from slime_torch.layers.builder import Builder
from slime_torch.layers.part import Layer, Routes
from slime_torch.layers.routing import grouped_product, has_grouped_product, routed
from slime_torch.layers.standard import standard_layer
from slime_torch.model.family_decoder import FamilyDecoder


class ClampedExperts:
    """Experts with biases, chosen by logits with a bias; gates are the softmax of those that are chosen.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.mlp.`.
    """

    def __init__(self, builder: Builder, prefix: str) -> None:
        a = builder.architecture
        assert isinstance(a, GptOssArchitecture)
        self._n, self._top_k = a.num_moe_experts or 0, a.moe_router_topk or 1
        self._alpha, self._limit = a.swiglu_alpha, a.swiglu_limit
        self._router, self._router_bias = (
            builder.tensor(f"{prefix}router.{name}") for name in ("weight", "bias")
        )
        self._gate_up, self._gate_up_bias, self._down, self._down_bias = (
            builder.tensor(f"{prefix}experts.{name}{end}")
            for name in ("gate_up_proj", "down_proj")
            for end in ("", "_bias")
        )

    @property
    def has_one_shape(self) -> bool:
        """Whether the host is asked nothing."""
        return all(has_grouped_product(each.tensor) for each in (self._gate_up, self._down))

    def __call__(self, x: Tensor, residual: Tensor | None, routes: Routes | None) -> Tensor:
        """Return what the experts give of rows [n, hidden_size], plus `residual`."""
        logits = F.linear(x, self._router.tensor, self._router_bias.tensor)
        chosen, experts = logits.topk(self._top_k, dim=-1)
        if routes is not None:
            routes.append(experts)
        total = routed(x, chosen.softmax(-1), experts, self._n, self._mlp)
        return total if residual is None else total.add_(residual)

    def _mlp(self, rows: Tensor, chosen: Tensor, ends: Tensor) -> Tensor:
        """Return each expert's MLP of its rows. Columns of its first matrix are gate and up by turns."""
        both = grouped_product(rows, self._gate_up.tensor, ends) + self._gate_up_bias.tensor[chosen]
        gate = both[:, 0::2].clamp(max=self._limit)
        up = both[:, 1::2].clamp(-self._limit, self._limit)
        inner = (up + 1) * gate * torch.sigmoid(self._alpha * gate)
        return grouped_product(inner, self._down.tensor, ends) + self._down_bias.tensor[chosen]


def gpt_oss_layers(builder: Builder) -> list[Layer]:
    """Return all layers; those with a window share a store, and those without."""
    a = builder.architecture
    assert isinstance(a, GptOssArchitecture)
    windows = [a.sliding_window if number in a.sliding_layers else None for number in range(a.num_layers)]
    kinds = {
        window: GroupedQueries(builder, window=window, has_sinks=True) for window in dict.fromkeys(windows)
    }
    return [
        standard_layer(
            builder,
            number,
            GroupedQueryAttention(builder, f"{builder.layer_prefix(number)}self_attn.", kinds[window]),
            ClampedExperts(builder, f"{builder.layer_prefix(number)}mlp."),
        )
        for number, window in enumerate(windows)
    ]


DECODER = FamilyDecoder(layers=gpt_oss_layers)
