"""The decoder of MiniMax-M2: norms over all heads of queries, and of keys, and experts under names of its own."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from slime_torch.families.routing import grouped_product, routed
from slime_torch.layers.attention import GroupedQueries
from slime_torch.layers.builder import Builder
from slime_torch.layers.part import Layer, Routes
from slime_torch.layers.standard import layer_prefix, standard_layer
from slime_torch.layers.torch_attention import HeadsPass
from slime_torch.model.family_decoder import FamilyDecoder


class AllHeadsAttention:
    """Attention whose queries, and keys, pass a norm over all heads together before they are rotated.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.self_attn.`.
        kind: that it shares with other layers.
    """

    def __init__(self, builder: Builder, prefix: str, kind: GroupedQueries) -> None:
        a, names = builder.architecture, [f"{prefix}{one}_proj.weight" for one in "qkv"]
        self._dim, self._sizes = a.head_dim, (a.query_size, a.key_value_size, a.key_value_size)
        orders = {
            one: [first + place for first in range(0, size, a.head_dim) for place in kind.order]
            for one, size in zip("qk", self._sizes, strict=False)
            if kind.order is not None
        }
        self._qkv = builder.matrix(
            *names, orders={f"{prefix}{one}_proj.weight": o for one, o in orders.items()}
        )
        self._norms = [builder.norm(f"{prefix}{one}_norm.weight", orders.get(one)) for one in "qk"]
        self.kind, self._index = kind, kind.join(None)
        self._output = builder.matrix(f"{prefix}o_proj.weight")

    def mix(self, x: Tensor, now: HeadsPass) -> Tensor:
        """Return what the heads attend to, [tokens, heads * head_dim]."""
        flat = self._qkv.linear(x)
        for norm, span in zip(self._norms, flat.split(self._sizes, dim=-1), strict=False):
            span.copy_(norm(span))
        heads = flat.view(len(x), -1, self._dim)
        now.place(self._index, heads)
        return now.attend(self._index, heads)

    def project(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        """Return the product after attention, plus `residual`."""
        return self._output.linear(mixed, then="none" if residual is None else "add", other=residual)


class BiasedExperts:
    """Experts that are chosen by sigmoids plus a bias, and weighed by the sigmoids alone, which are made to sum to 1.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.block_sparse_moe.`.
    """

    def __init__(self, builder: Builder, prefix: str) -> None:
        a = builder.architecture
        self._n, self._top_k = a.num_moe_experts or 0, a.moe_router_topk or 1
        self._router = builder.tensor(f"{prefix}gate.weight")
        self._bias = builder.tensor(f"{prefix}e_score_correction_bias")
        experts = [f"{prefix}experts.{number}." for number in range(self._n)]
        self._gate_up = builder.tensor(*(f"{one}w{which}.weight" for one in experts for which in (1, 3)))
        self._down = builder.tensor(*(f"{one}w2.weight" for one in experts))

    def __call__(self, x: Tensor, residual: Tensor | None, routes: Routes | None) -> Tensor:
        """Return what the experts give of rows [n, hidden_size], plus `residual`."""
        scores = F.linear(x, self._router.tensor).float().sigmoid()
        experts = (scores + self._bias.tensor).topk(self._top_k, dim=-1).indices
        gates = scores.gather(-1, experts)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        if routes is not None:
            routes.append(experts)
        total = routed(x, gates, experts, self._n, self._mlp)
        return total if residual is None else total.add_(residual)

    def _mlp(self, rows: Tensor, chosen: Tensor, ends: Tensor) -> Tensor:
        """Return each expert's MLP of its rows."""
        gate_up, down = (
            each.tensor.unflatten(0, (self._n, -1)).transpose(1, 2) for each in (self._gate_up, self._down)
        )
        gate, up = grouped_product(rows, gate_up, ends).chunk(2, dim=-1)
        return grouped_product(F.silu(gate).mul_(up), down, ends)


def minimax_m2_layers(builder: Builder) -> list[Layer]:
    """Return all layers."""
    kind = GroupedQueries(builder)
    return [
        standard_layer(
            builder,
            number,
            AllHeadsAttention(builder, f"{layer_prefix(number)}self_attn.", kind),
            BiasedExperts(builder, f"{layer_prefix(number)}block_sparse_moe."),
        )
        for number in range(builder.architecture.num_layers)
    ]


DECODER = FamilyDecoder(layers=minimax_m2_layers)
