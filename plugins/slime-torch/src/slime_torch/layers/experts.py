"""Experts: a router, an MLP that each token may be sent to, and one that every token passes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slime_torch.layers.builder import Builder
from slime_torch.layers.mlp import GatedMlp
from slime_torch.layers.part import Routes
from slime_torch.layers.routing import grouped_product, has_grouped_product, routed

#: Experts by whose scores a group of experts is rated. Source: transformers, `Glm4MoeTopkRouter`.
_RATED_BY = 2
#: Kept from a division by zero, where all scores of a token are.
_TINY = 1e-20


class ExpertRouter:
    """Chooses the experts of each token, and the gates that weigh what they give.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.mlp.gate.`.
        bias: name of the bias, where the model has one; `e_score_correction_bias` after the prefix when not given.
    """

    def __init__(self, builder: Builder, prefix: str, *, bias: str | None = None) -> None:
        a = builder.architecture
        self._top_k, self._is_sigmoid = a.moe_router_topk or 1, a.moe_router_score_function == "sigmoid"
        self._sums_to_one, self._scale = a.moe_norm_topk_prob, a.moe_router_topk_scaling_factor
        self._groups, self._kept_groups = a.moe_router_num_groups, a.moe_router_group_topk or 1
        self._weight = builder.tensor(f"{prefix}weight")
        self._bias = None
        if a.moe_router_enable_expert_bias:
            self._bias = builder.tensor(bias or f"{prefix}e_score_correction_bias")

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (gates of `x`'s dtype, experts int64), [n, top_k] each, of tokens [n, hidden_size].

        Scores are float32; sigmoids are of float32 products, too. Source: transformers, the routers of Qwen and GLM.
        """
        weight = self._weight.tensor
        if self._is_sigmoid:
            scores = F.linear(x.float(), weight.float()).sigmoid_()
        else:
            scores = F.linear(x, weight).softmax(-1, dtype=torch.float32)
        experts = self._ratings(scores).topk(self._top_k, dim=-1).indices
        gates = scores.gather(-1, experts)
        if self._sums_to_one:
            gates = gates / (gates.sum(-1, keepdim=True) + _TINY)
        if self._scale is not None:
            gates = gates * self._scale
        return gates.to(x.dtype), experts

    def _ratings(self, scores: Tensor) -> Tensor:
        """Return that by which experts are chosen: with the bias, and -inf in groups that are not."""
        if self._bias is not None:
            scores = scores + self._bias.tensor
        if self._groups is None:
            return scores
        grouped = scores.view(len(scores), self._groups, -1)
        of_groups = grouped.topk(_RATED_BY, dim=-1).values.sum(-1)
        kept = torch.zeros_like(of_groups, dtype=torch.bool)
        kept.scatter_(1, of_groups.topk(self._kept_groups, dim=-1).indices, value=True)
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


class Experts:
    """Routed experts, beside a shared one where the model has it: tokens are sorted by expert, and each has one product a matrix.

    Weights lie as [experts, rows, columns]. A token's sum over its experts does not depend on other tokens.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.mlp.`.
        router: that chooses; the usual one, under the usual names, when not given.
        names: of the gate, up and down projections of an expert.
    """

    def __init__(
        self,
        builder: Builder,
        prefix: str,
        *,
        router: ExpertRouter | None = None,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        self._n = builder.architecture.num_moe_experts or 0
        self._router = router or ExpertRouter(builder, f"{prefix}gate.")
        experts = [f"{prefix}experts.{number}." for number in range(self._n)]
        self._gate_up = builder.tensor(
            *(f"{expert}{name}.weight" for expert in experts for name in names[:2])
        )
        self._down = builder.tensor(*(f"{expert}{names[2]}.weight" for expert in experts))
        self._shared = self._shared_gate = None
        for name in ("shared_expert", "shared_experts"):
            if builder.has(f"{prefix}{name}.down_proj.weight"):
                self._shared = GatedMlp(builder, f"{prefix}{name}.")
        if builder.has(name := f"{prefix}shared_expert_gate.weight"):
            self._shared_gate = builder.tensor(name)

    @property
    def has_one_shape(self) -> bool:
        """Whether the host is asked nothing."""
        return all(
            has_grouped_product(each.tensor.unflatten(0, (self._n, -1)))
            for each in (self._gate_up, self._down)
        )

    def __call__(self, x: Tensor, residual: Tensor | None, routes: Routes | None) -> Tensor:
        """Return what the experts give of rows [n, hidden_size], plus `residual`."""
        gates, experts = self._router(x)
        if routes is not None:
            routes.append(experts)
        total = routed(x, gates, experts, self._n, self._each)
        if self._shared is None:
            return total if residual is None else total.add_(residual)
        if self._shared_gate is None:
            return total.add_(self._shared(x, residual, None))
        gate = F.linear(x, self._shared_gate.tensor).sigmoid_()
        total.addcmul_(gate, self._shared(x, None, None))
        return total if residual is None else total.add_(residual)

    def _each(self, rows: Tensor, chosen: Tensor, ends: Tensor) -> Tensor:
        """Return each expert's MLP of its rows."""
        gate_up, down = (
            each.tensor.unflatten(0, (self._n, -1)).transpose(1, 2) for each in (self._gate_up, self._down)
        )
        return grouped_product(_activated(grouped_product(rows, gate_up, ends)), down, ends)


def _activated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, of both side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
