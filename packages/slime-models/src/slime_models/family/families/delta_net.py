"""What families with gated delta net layers share: Qwen 3 Next and Qwen 3.5."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_models.family.architecture import Architecture, ConfigReader
from slime_models.family.families.dense import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    FINAL_NORM,
    INPUT_NORM,
    KEY_NORM,
    MLP_NORM,
    OUTPUT,
    QKV_WEIGHT,
    QUERY_NORM,
    dense_architecture,
)
from slime_models.family.rules import RENAME, Rule, Shard, WeightLayout, always, rename

if TYPE_CHECKING:
    from torch import Tensor

_MEGATRON, _HF = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.linear_attn."
_LINEAR, _FULL = "linear_attention", "full_attention"
#: The layers of the engine `torch`.
DECODER = "slime_torch.families.delta_net:DECODER"
#: The trainer's layers.
LAYERS = "slime_megatron.families.delta_net_layers:LAYERS"
#: `FamilyMemory` of the trainer.
MEMORY = "slime_megatron.memory.families.delta_net:MEMORY"
#: What a model of these families cannot be cut into.
NOT_PARALLEL = {
    "context": "the state of a delta net goes from token to token, and context-parallel ranks have pieces of sequences"
}
#: Engines that do not serve them.
NOT_SERVED = {
    "sglang": "SGLang 0.5.23 computes delta nets by Triton kernels, which a machine without a GPU cannot run, and nobody has tried it "
    "with one"
}


@dataclass(frozen=True, kw_only=True)
class DeltaNetArchitecture(Architecture):
    """A decoder some of whose layers have a gated delta net in the place of attention.

    Attention, in the other layers, has a gate for each of its outputs; norms multiply by 1 + weight.
    """

    linear_layers: tuple[int, ...]
    """Layers, from 0, with a delta net."""
    linear_num_key_heads: int
    """Heads of queries and keys of a delta net."""
    linear_num_value_heads: int
    """Heads of values, as many for each key head; each has a state of its own."""
    linear_key_head_dim: int
    """Width of a query and key head."""
    linear_value_head_dim: int
    """Width of a value head."""
    linear_conv_kernel_dim: int
    """Tokens that the convolution before a delta net sees, the last among them."""

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers, from 0, with attention."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.linear_layers)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Those with attention: what a delta net keeps does not grow with the tokens."""
        return self.full_layers

    @property
    def has_like_layers(self) -> bool:
        """False: a delta net and attention have other tensors."""
        return False

    @property
    def tensor_parts(self) -> dict[str, int]:
        """What tensor-parallel ranks share out whole: also the key heads of delta nets."""
        return super().tensor_parts | {"key heads of linear attention": self.linear_num_key_heads}

    @property
    def gated_query_size(self) -> int:
        """Rows of the projection of queries and of the gates of attention's output."""
        return 2 * self.query_size

    @property
    def gated_qkv_size(self) -> int:
        """Rows of Megatron's fused query, gate, key and value projection."""
        return self.qkv_size + self.query_size

    @property
    def linear_key_size(self) -> int:
        """Width of all query heads of a delta net, and of all key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        """Width of all value heads of a delta net."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_qkv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.linear_key_size + self.linear_value_size

    @property
    def linear_qkvz_size(self) -> int:
        """The same, and the gates of a delta net's output."""
        return self.linear_qkv_size + self.linear_value_size

    @property
    def linear_gates_size(self) -> int:
        """Betas and decays of all value heads."""
        return 2 * self.linear_num_value_heads

    @property
    def linear_in_size(self) -> int:
        """Rows of Megatron's fused projection into a delta net: all of these."""
        return self.linear_qkvz_size + self.linear_gates_size


def delta_net_architecture(
    config: Mapping[str, Any], *, model_type: str, where: str = "config.json"
) -> DeltaNetArchitecture:
    """Read the fields of these families that say nothing of experts.

    Args:
        config: the parsed file, or the part of it that describes the text model.
        model_type: the family's; `config` must say the same.
        where: how messages name `config`.

    Raises:
        DataError: names the field that is missing, wrong, or asks for what is not implemented.
    """
    read = ConfigReader(config, where)
    read.require("attn_output_gate", (True,), default=True)
    read.require("mamba_ssm_dtype", ("float32",), default="float32")
    read.require("output_gate_type", ("swish", "silu"), default="swish")  # two names of one function
    plain = {name: value for name, value in config.items() if name != "layer_types"}
    common = dense_architecture(
        plain,
        model_type=model_type,
        head_dim=256,
        qk_layernorm=True,
        partial_rotary_factor=0.25,
        where=where,
    )
    keys, values = read.integer("linear_num_key_heads", 16), read.integer("linear_num_value_heads", 32)
    if values % keys:
        raise read.error("linear_num_value_heads", values, f"a multiple of linear_num_key_heads, {keys}")
    return DeltaNetArchitecture(
        **vars(common),
        linear_layers=_linear_layers(read, common.num_layers),
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=read.integer("linear_key_head_dim", 128),
        linear_value_head_dim=read.integer("linear_value_head_dim", 128),
        linear_conv_kernel_dim=read.integer("linear_conv_kernel_dim", 4),
    )


def _linear_layers(read: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the layers with a delta net: as `layer_types` says, or all but each `full_attention_interval`-th."""
    kinds = read.get("layer_types")
    if kinds is None:
        every = read.integer("full_attention_interval", 4)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise read.error("layer_types", kinds, f"a list of num_hidden_layers, {num_layers}, kinds")
    for index, kind in enumerate(kinds):
        if kind not in (_LINEAR, _FULL):
            raise read.error(f"layer_types[{index}]", kind, f"{_LINEAR!r} or {_FULL!r}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)


def linear_layers(architecture: Architecture) -> Sequence[int]:
    """Only layers with a delta net have the tensor."""
    assert isinstance(architecture, DeltaNetArchitecture)
    return architecture.linear_layers


def full_layers(architecture: Architecture) -> Sequence[int]:
    """Only layers with attention have the tensor."""
    assert isinstance(architecture, DeltaNetArchitecture)
    return architecture.full_layers


def _pack_gated_qkv(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    import torch

    a, (query, *others) = architecture, parts
    pairs = query.reshape(a.num_query_groups, a.heads_per_group, 2, a.head_dim, *query.shape[1:])
    by_group = [pairs[:, :, 0], pairs[:, :, 1]]
    by_group += [part.reshape(a.num_query_groups, 1, a.head_dim, *part.shape[1:]) for part in others]
    return torch.cat(by_group, dim=1).flatten(0, 2)


def _unpack_gated_qkv(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    import torch

    a, n = architecture, architecture.heads_per_group
    by_group = tensor.reshape(a.num_query_groups, 2 * n + 2, a.head_dim, *tensor.shape[1:])
    query, gate, key, value = by_group.split((n, n, 1, 1), dim=1)
    return torch.stack((query, gate), dim=2).flatten(0, 3), key.flatten(0, 2), value.flatten(0, 2)


def _by_key_head(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    """Return parts, each in the order of its heads, with the rows of each key head beside each other."""
    import torch

    assert isinstance(architecture, DeltaNetArchitecture)
    heads = architecture.linear_num_key_heads
    return torch.cat([part.reshape(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _of_key_heads(tensor: Tensor, architecture: Architecture, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return the parts of `_by_key_head`, of so many rows each."""
    assert isinstance(architecture, DeltaNetArchitecture)
    heads = architecture.linear_num_key_heads
    by_head = tensor.reshape(heads, -1, *tensor.shape[1:])
    return [part.flatten(0, 1) for part in by_head.split([size // heads for size in sizes], dim=1)]


def _qkv_sizes(a: Architecture) -> list[int]:
    assert isinstance(a, DeltaNetArchitecture)
    return [a.linear_key_size, a.linear_key_size, a.linear_value_size]


def _pack_channels(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    (whole,) = parts
    return _by_key_head(whole.split(_qkv_sizes(architecture)), architecture)


def _unpack_channels(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    import torch

    return (torch.cat(tuple(_of_key_heads(tensor, architecture, _qkv_sizes(architecture)))),)


def _unpack_grouped(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    assert isinstance(architecture, DeltaNetArchitecture)
    sizes = [architecture.linear_qkvz_size, architecture.linear_gates_size]
    return _of_key_heads(tensor, architecture, sizes)


def _pack_separate(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    qkv, *others = parts
    return _by_key_head([*qkv.split(_qkv_sizes(architecture)), *others], architecture)


def _unpack_separate(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    import torch

    assert isinstance(architecture, DeltaNetArchitecture)
    sizes, heads = _qkv_sizes(architecture), architecture.linear_num_value_heads
    found = _of_key_heads(tensor, architecture, [*sizes, architecture.linear_value_size, heads, heads])
    return torch.cat(tuple(found[:3])), *found[3:]


#: As `QKV`; folders have the gates of each head's output after its queries, Megatron after the queries of its group.
GATED_QKV = WeightLayout("gated qkv", _pack_gated_qkv, _unpack_gated_qkv)
#: Queries, keys and values one above the other in folders, by key head in Megatron.
CHANNELS = WeightLayout("channels by key head", _pack_channels, _unpack_channels)
#: Two tensors, each by key head, in one.
GROUPED = WeightLayout("grouped projections", _by_key_head, _unpack_grouped)
#: Tensors one above the other in folders, by key head in Megatron.
SEPARATE = WeightLayout("separate projections", _pack_separate, _unpack_separate)


_HIDDEN = ("hidden_size",)
_GATED_QKV_WEIGHT = dataclasses.replace(
    QKV_WEIGHT,
    dims=("gated_qkv_size", *_HIDDEN),
    hf=((QKV_WEIGHT.hf[0][0], ("gated_query_size", *_HIDDEN)), *QKV_WEIGHT.hf[1:]),
    layout=GATED_QKV,
)


def _of_delta_net(
    megatron: str, *hf: tuple[str, str], size: str, rest: tuple[str, ...], layout: WeightLayout
) -> Rule:
    """Return the rule of a tensor of which tensor-parallel ranks have the rows of whole key heads.

    Args:
        megatron: name within the delta net.
        hf: (name, rows) of each tensor in folders.
        size: rows in Megatron.
        rest: dimensions after the rows.
        layout: between the two.
    """
    return Rule(
        megatron=_MEGATRON + megatron,
        dims=(size, *rest),
        hf=tuple((_HF + name, (rows, *rest)) for name, rows in hf),
        layout=layout,
        shard=Shard.ROWS,
        when=always,
        layers=linear_layers,
    )


#: Qwen 3 Next's folders have the rows of a key head beside each other, in two tensors.
GROUPED_PROJECTION = _of_delta_net(
    "linear_qkv.weight",
    ("in_proj_qkvz.weight", "linear_qkvz_size"),
    ("in_proj_ba.weight", "linear_gates_size"),
    size="linear_in_size",
    rest=_HIDDEN,
    layout=GROUPED,
)
#: Qwen 3.5's have one projection above the other, in four.
SEPARATE_PROJECTION = _of_delta_net(
    "linear_qkv.weight",
    ("in_proj_qkv.weight", "linear_qkv_size"),
    ("in_proj_z.weight", "linear_value_size"),
    ("in_proj_b.weight", "linear_num_value_heads"),
    ("in_proj_a.weight", "linear_num_value_heads"),
    size="linear_in_size",
    rest=_HIDDEN,
    layout=SEPARATE,
)
_DELTA_NET = (
    _of_delta_net(
        "conv_weight",
        ("conv1d.weight", "linear_qkv_size"),
        size="linear_qkv_size",
        rest=("one", "linear_conv_kernel_dim"),
        layout=CHANNELS,
    ),
    *(
        _of_delta_net(
            name, (name, "linear_num_value_heads"), size="linear_num_value_heads", rest=(), layout=RENAME
        )
        for name in ("dt_bias", "A_log")
    ),
    rename(
        _MEGATRON + "out_norm.weight", _HF + "norm.weight", ("linear_value_head_dim",), layers=linear_layers
    ),
    rename(
        _MEGATRON + "linear_proj.weight",
        _HF + "out_proj.weight",
        ("hidden_size", "linear_value_size"),
        shard=Shard.COLUMNS,
        layers=linear_layers,
    ),
)


def delta_net_rules(projection: Rule, mlp: Iterable[Rule], *, prefix: str = "model.") -> tuple[Rule, ...]:
    """Return the table of a decoder.

    Args:
        projection: that into a delta net.
        mlp: the rules after the norm before the MLP.
        prefix: of all names in folders but the output layer's.
    """
    attention = (_GATED_QKV_WEIGHT, QUERY_NORM, KEY_NORM, ATTENTION_OUTPUT)
    rules = (
        EMBEDDING,
        INPUT_NORM,
        *(dataclasses.replace(rule, layers=full_layers) for rule in attention),
        projection,
        *_DELTA_NET,
        MLP_NORM,
        *mlp,
        FINAL_NORM,
        OUTPUT,
    )
    return tuple(dataclasses.replace(rule, hf=_within(prefix, rule)) for rule in rules)


def _within(prefix: str, rule: Rule) -> tuple[tuple[str, tuple[str, ...]], ...]:
    plain = "model."
    return tuple(
        (prefix + name.removeprefix(plain) if name.startswith(plain) else name, dims)
        for name, dims in rule.hf
    )
