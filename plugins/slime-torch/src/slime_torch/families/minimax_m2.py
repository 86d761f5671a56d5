"""The decoder of MiniMax-M2: norms over all heads of queries, and of keys, and experts under names of its own."""

from __future__ import annotations

from torch import Tensor

from slime_torch.layers.attention import GroupedQueries
from slime_torch.layers.builder import Builder
from slime_torch.layers.experts import ExpertRouter, Experts
from slime_torch.layers.part import Layer
from slime_torch.layers.standard import standard_layer
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


def _experts(builder: Builder, prefix: str) -> Experts:
    """Return the experts of a layer, with names that begin with `model.layers.0.block_sparse_moe.`."""
    router = ExpertRouter(builder, f"{prefix}gate.", bias=f"{prefix}e_score_correction_bias")
    return Experts(builder, prefix, router=router, names=("w1", "w3", "w2"))


def minimax_m2_layers(builder: Builder) -> list[Layer]:
    """Return all layers."""
    kind = GroupedQueries(builder)
    return [
        standard_layer(
            builder,
            number,
            AllHeadsAttention(builder, f"{builder.layer_prefix(number)}self_attn.", kind),
            _experts(builder, f"{builder.layer_prefix(number)}block_sparse_moe."),
        )
        for number in range(builder.architecture.num_layers)
    ]


DECODER = FamilyDecoder(layers=minimax_m2_layers)
