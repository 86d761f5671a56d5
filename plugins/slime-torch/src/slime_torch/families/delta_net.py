"""`DECODER`: the layers of Qwen 3 Next and Qwen 3.5."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slime_models.delta_rule import causal_convolution, gated_delta_rule
from slime_models.family.families.delta_net import DeltaNetArchitecture
from torch import Tensor
from torch.nn import functional as F

from slime_torch.layers.attention import GroupedQueries
from slime_torch.layers.batch import Batch
from slime_torch.layers.builder import Builder
from slime_torch.layers.part import Attention, Layer
from slime_torch.layers.standard import standard_mlp
from slime_torch.layers.torch_attention import HeadsPass
from slime_torch.model.family_decoder import FamilyDecoder
from slime_torch.storage.cache import StateStore


class DeltaNets:
    """The kind: of each sequence the last inputs of the convolution, and a state for each value head.

    Args:
        builder: of the model.
    """

    def __init__(self, builder: Builder) -> None:
        a = builder.architecture
        assert isinstance(a, DeltaNetArchitecture)
        self._n_layers, self._device = len(a.linear_layers), builder.device
        self._parts = [
            ((a.linear_conv_kernel_dim - 1, a.linear_qkv_size), builder.dtype),
            ((a.linear_num_value_heads, a.linear_key_head_dim, a.linear_value_head_dim), torch.float32),
        ]

    def create_store(self, *, page_len: int, dtype: torch.dtype | None = None) -> StateStore:
        """Return an empty store; a state is float32 whatever the dtype."""
        return StateStore(self._n_layers, parts=self._parts, device=self._device)

    def begin(self, batch: Batch, store: StateStore) -> tuple[Batch, StateStore]:
        """Begin a pass."""
        return batch, store


class DeltaNet:
    """The part: projections, convolution, gated delta rule, gated norm.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.linear_attn.`.
        kind: that it shares with other layers.
        index: among the layers with a delta net.
    """

    def __init__(self, builder: Builder, prefix: str, kind: DeltaNets, index: int) -> None:
        a = builder.architecture
        assert isinstance(a, DeltaNetArchitecture)
        self.kind, self._index, self._a, self._epsilon = kind, index, a, a.norm_epsilon
        grouped = f"{prefix}in_proj_qkvz.weight"
        if builder.has(grouped):
            beside = f"{prefix}in_proj_ba.weight"
            orders = {grouped: _apart(a, _qkvz(a)), beside: _apart(a, [a.linear_num_value_heads] * 2)}
            self._in = builder.matrix(grouped, beside, orders=orders)
        else:
            self._in = builder.matrix(*(f"{prefix}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")))
        self._convolution = builder.tensor(f"{prefix}conv1d.weight")
        self._dt_bias, self._decay = (builder.tensor(prefix + name) for name in ("dt_bias", "A_log"))
        self._norm = builder.tensor(f"{prefix}norm.weight")
        self._out = builder.matrix(f"{prefix}out_proj.weight")

    def mix(self, x: Tensor, now: tuple[Batch, StateStore]) -> Tensor:
        """Return what the heads read, normed and gated: [tokens, value heads * value width]."""
        (batch, store), a = now, self._a
        heads = a.linear_num_value_heads
        channels, gate, beta, decay = self._in.linear(x).split(
            (a.linear_qkv_size, a.linear_value_size, heads, heads), dim=-1
        )
        beta = beta.sigmoid()
        decay = F.softplus(decay.float() + self._dt_bias.tensor.float()) * -self._decay.tensor.float().exp()
        inputs, memory = store.layers[self._index]
        if batch.prompts is None:
            n = len(x)
            read = self._recur([part[:, None] for part in (channels, beta, decay)], inputs[:n], memory[:n])
        else:
            read = torch.cat(
                [
                    self._recur(
                        [
                            part[run.tokens].unflatten(0, (run.prompts, run.length))
                            for part in (channels, beta, decay)
                        ],
                        inputs,
                        memory,
                        slots=run.slots,
                    )
                    for run in batch.prompts.runs
                ]
            )
        normed = F.rms_norm(read.float(), (a.linear_value_head_dim,), None, self._epsilon).to(x.dtype)
        gates = F.silu(gate.reshape(read.shape).float())
        return (self._norm.tensor * normed * gates).to(x.dtype).flatten(1)

    def _recur(
        self, parts: Sequence[Tensor], inputs: Tensor, memory: Tensor, *, slots: Tensor | None = None
    ) -> Tensor:
        """Return what tokens read [tokens, value heads, value width], and keep what later ones need.

        Args:
            parts: channels, beta and decay [sequences, tokens, ...].
            inputs: of the store, of those sequences that go on.
            memory: the same.
            slots: of sequences that begin.
        """
        (channels, beta, decay), a = parts, self._a
        begins, seen = slots is not None, a.linear_conv_kernel_dim - 1
        earlier = channels.new_zeros(len(channels), seen, channels.size(-1)) if begins else inputs
        mixed = causal_convolution(channels, self._convolution.tensor, earlier)
        query, key, value = mixed.split((a.linear_key_size, a.linear_key_size, a.linear_value_size), dim=-1)
        out, state = gated_delta_rule(
            query.unflatten(-1, (a.linear_num_key_heads, -1)),
            key.unflatten(-1, (a.linear_num_key_heads, -1)),
            value.unflatten(-1, (a.linear_num_value_heads, -1)),
            log_decay=decay,
            beta=beta,
            state=None if begins else memory,
        )
        last = torch.cat((earlier, channels), dim=1)[:, channels.size(1) :]
        if slots is None:
            inputs.copy_(last)
            memory.copy_(state)
        else:
            inputs[slots], memory[slots] = last, state
        return out.flatten(0, 1)

    def project(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        """Return the last product, plus `residual`."""
        return self._out.linear(mixed, then="none" if residual is None else "add", other=residual)


class GatedAttention:
    """The part: attention whose output is multiplied by the sigmoid of gates, which `q_proj` has after each head's queries.

    Args:
        builder: of the model.
        prefix: of the tensors' names: `model.layers.0.self_attn.`.
        kind: that it shares with other layers.
    """

    def __init__(self, builder: Builder, prefix: str, kind: GroupedQueries) -> None:
        a = builder.architecture
        self._dim, self._n_gates = a.head_dim, a.query_size
        order = kind.order or list(range(a.head_dim))
        heads = range(0, 2 * a.query_size, 2 * a.head_dim)
        gates_first = [first + a.head_dim + place for first in heads for place in range(a.head_dim)]
        gates_first += [first + place for first in heads for place in order]
        keys = [first + place for first in range(0, a.key_value_size, a.head_dim) for place in order]
        query, key, value = (f"{prefix}{one}_proj.weight" for one in "qkv")
        self._in = builder.matrix(query, key, value, orders={query: gates_first, key: keys})
        norms = (builder.norm(f"{prefix}{one}_norm.weight", kind.order, offset=1.0) for one in "qk")
        query_norm, key_norm = norms
        self.kind, self._index = kind, kind.join((query_norm, key_norm))
        self._out = builder.matrix(f"{prefix}o_proj.weight")

    def mix(self, x: Tensor, now: HeadsPass) -> Tensor:
        """Return what the heads attend to, gated: [tokens, heads * head_dim]."""
        product = self._in.linear(x)
        gates, heads = product[:, : self._n_gates], product[:, self._n_gates :].contiguous()
        heads = heads.view(len(x), -1, self._dim)
        now.place(self._index, heads)
        return now.attend(self._index, heads) * gates.sigmoid()

    def project(self, mixed: Tensor, residual: Tensor | None) -> Tensor:
        """Return the product after attention, plus `residual`."""
        return self._out.linear(mixed, then="none" if residual is None else "add", other=residual)


def _qkvz(a: DeltaNetArchitecture) -> list[int]:
    return [a.linear_key_size, a.linear_key_size, a.linear_value_size, a.linear_value_size]


def _apart(a: DeltaNetArchitecture, sizes: Sequence[int]) -> list[int]:
    """Return the rows that folders have by key head, parts of so many rows, in the order of whole parts."""
    heads, order, first = a.linear_num_key_heads, [], 0
    of_head = sum(sizes) // heads
    for size in sizes:
        each = size // heads
        order += [head * of_head + first + row for head in range(heads) for row in range(each)]
        first += each
    return order


def delta_net_layers(builder: Builder) -> list[Layer]:
    """Return all layers of a decoder."""
    a = builder.architecture
    assert isinstance(a, DeltaNetArchitecture)
    nets, queries, layers = DeltaNets(builder), GroupedQueries(builder), []
    for number in range(a.num_layers):
        prefix = builder.layer_prefix(number)
        if number in a.linear_layers:
            index = a.linear_layers.index(number)
            attention: Attention = DeltaNet(builder, f"{prefix}linear_attn.", nets, index)
        else:
            attention = GatedAttention(builder, f"{prefix}self_attn.", queries)
        layers.append(
            Layer(
                input_norm=builder.norm(f"{prefix}input_layernorm.weight", offset=1.0),
                attention=attention,
                mlp_norm=builder.norm(f"{prefix}post_attention_layernorm.weight", offset=1.0),
                mlp=standard_mlp(builder, number),
            )
        )
    return layers


DECODER = FamilyDecoder(layers=delta_net_layers, norm=lambda builder, name: builder.norm(name, offset=1.0))
