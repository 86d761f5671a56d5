"""Rules between Hugging Face and Megatron weights: one table per family, read in both directions.

A rule ties one Megatron tensor to the Hugging Face tensors that it holds. Each kind of rule is a `WeightLayout`, a
pair of functions that pack and unpack; because a family lists its rules once, the two directions cannot
disagree. Megatron names are those of megatron-core's local layer spec, with global numbers of layers and experts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slime_models.family.architecture import Architecture

if TYPE_CHECKING:
    from torch import Tensor

#: Where the layer's number stands in names.
LAYER = "{layer}"
#: Where the expert's number stands in names; Megatron's names carry it across all expert-parallel ranks.
EXPERT = "{expert}"
#: Where the number of a multi-token prediction (MTP) layer stands in names of folders that count these layers from 0.
MTP_LAYER = "{mtp}"

_DECODER, _MTP, _HF_LAYER = "decoder.layers.{layer}.", "mtp.layers.{layer}.", "model.layers.{layer}."

#: Shape by name: each entry is an integer attribute of `Architecture`.
Dims = tuple[str, ...]


class Shard(enum.Enum):
    """How tensor parallelism cuts a Megatron tensor (see `slime_models.family.sharding`)."""

    NONE = "none"
    """Every rank holds all of it."""
    ROWS = "rows"
    """Dimension 0 in equal parts."""
    COLUMNS = "columns"
    """Dimension 1 in equal parts."""
    QKV_ROWS = "qkv rows"
    """Dimension 0 in equal parts of whole query groups."""
    GATED_ROWS = "gated rows"
    """Gate and up are cut alike, and each rank holds its part of the gate above its part of up."""


@dataclass(frozen=True)
class WeightLayout:
    """A pair of inverse functions between Hugging Face tensors and the Megatron tensor that holds them."""

    name: str
    pack: Callable[[Sequence[Tensor], Architecture], Tensor]
    """(Hugging Face tensors, architecture) -> Megatron tensor; a view where it can be."""
    unpack: Callable[[Tensor, Architecture], Sequence[Tensor]]
    """(Megatron tensor, architecture) -> Hugging Face tensors; views where they can be."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One Megatron tensor, and the Hugging Face tensors that it holds.

    Names with `{layer}` stand for one tensor in every layer, those with `{expert}` for one of every expert in it.
    """

    megatron: str
    dims: Dims
    hf: tuple[tuple[str, Dims], ...]
    """(name, dims) of each tensor, in the order in which the layout takes them."""
    layout: WeightLayout
    shard: Shard
    when: Callable[[Architecture], bool]
    """Whether a model of this architecture has the tensor."""
    layers: Callable[[Architecture], Sequence[int]]
    """The layers that have it, where its name has a layer."""
    buffer: bool = False
    """A float32 buffer of Megatron's: it has no gradient, and is float32 on every way whatever the model's dtype."""
    frozen: bool = False
    """A weight that no gradient reaches: it stays as the folder has it."""
    mtp: bool = False
    """Whether it is of a multi-token prediction (MTP) layer: Megatron counts these from 0, folders from `num_layers`."""

    @property
    def of_experts(self) -> bool:
        """Whether every expert has one: expert parallelism shares these out, whole experts a rank."""
        return EXPERT in self.megatron

    @property
    def stacked(self) -> bool:
        """Whether folders hold the tensors of all experts as one, whose first dimension, `num_moe_experts`, counts them."""
        return self.of_experts and not any(EXPERT in name for name, _ in self.hf)


@dataclass(frozen=True, kw_only=True)
class MtpNames:
    """What a folder calls the tensors of a multi-token prediction (MTP) layer, beside those of the decoder layer in it."""

    prefix: str = _HF_LAYER
    """Before all of them, with the layer's number: `{layer}` counts on from the decoder's, `{mtp}` from 0."""
    embedding_norm: str = "enorm"
    """The norm of embeddings."""
    hidden_norm: str = "hnorm"
    """The norm of hidden states."""
    projection: str = "eh_proj"
    """The matrix that joins them."""
    final_norm: str = "shared_head.norm"
    """The norm before the output layer."""
    hidden_first: bool = False
    """The matrix takes the hidden state's half of its columns first, then the embedding's."""


def always(architecture: Architecture) -> bool:
    """Every model of the family has the tensor."""
    return True


def untied(architecture: Architecture) -> bool:
    """Only models whose output layer is not the embedding have the tensor."""
    return not architecture.tie_word_embeddings


def every_layer(architecture: Architecture) -> Sequence[int]:
    """All layers have the tensor."""
    return range(architecture.num_layers)


def dense_layers(architecture: Architecture) -> Sequence[int]:
    """Only layers with a dense MLP have the tensor."""
    others = set(architecture.moe_layers)
    return [layer for layer in range(architecture.num_layers) if layer not in others]


def moe_layers(architecture: Architecture) -> Sequence[int]:
    """Only layers with experts have the tensor."""
    return architecture.moe_layers


def mtp_layers(architecture: Architecture) -> Sequence[int]:
    """Only multi-token prediction layers have the tensor; numbered after the decoder's."""
    first = architecture.num_layers
    return range(first, first + architecture.mtp_num_layers)


def mtp_rules(decoder: Iterable[Rule], names: MtpNames = MtpNames()) -> Iterator[Rule]:
    """Yield the rules of a multi-token prediction layer: its own, and those of the decoder layer inside it, built as the last one.

    Megatron's first matrix takes the embedding's half of its columns first, then the hidden state's; so do most folders.
    Source: `multi_token_prediction.py` of megatron-core 0.19.2 (`_concat_embeddings`), `glm4_moe_nextn.py` and `mimo_mtp.py`
    of SGLang.

    Args:
        decoder: the rules of the family.
        names: those of the folder.
    """
    for own, name in (("enorm", names.embedding_norm), ("hnorm", names.hidden_norm)):
        yield _mtp_rule(
            rename(f"{_MTP}{own}.weight", f"{names.prefix}{name}.weight", ("hidden_size",)), every_layer
        )
    projection = rename(
        f"{_MTP}eh_proj.weight",
        f"{names.prefix}{names.projection}.weight",
        ("hidden_size", "two_hidden_sizes"),
        shard=Shard.ROWS,
    )
    if names.hidden_first:
        projection = replace(projection, layout=HALVES_SWAPPED)
    yield _mtp_rule(projection, every_layer)
    for rule in decoder:
        if LAYER in rule.megatron:
            hf = tuple((name.replace(_HF_LAYER, names.prefix), dims) for name, dims in rule.hf)
            inner = rule.megatron.replace(_DECODER, f"{_MTP}mtp_model_layer.")
            yield _mtp_rule(replace(rule, megatron=inner, hf=hf), rule.layers)
    yield _mtp_rule(
        rename(f"{_MTP}final_layernorm.weight", f"{names.prefix}{names.final_norm}.weight", ("hidden_size",)),
        every_layer,
    )


def _mtp_rule(rule: Rule, layers: Callable[[Architecture], Sequence[int]]) -> Rule:
    """Return a rule of the MTP layers of models whose last decoder layer is one of `layers`."""

    def when(architecture: Architecture) -> bool:
        last = architecture.num_layers - 1
        return architecture.holds_mtp and rule.when(architecture) and last in layers(architecture)

    return replace(rule, when=when, layers=mtp_layers, mtp=True)


def rename(
    megatron: str,
    hf: str,
    dims: Dims,
    *,
    shard: Shard = Shard.NONE,
    when: Callable[[Architecture], bool] = always,
    layers: Callable[[Architecture], Sequence[int]] = every_layer,
    buffer: bool = False,
    frozen: bool = False,
) -> Rule:
    """One tensor under two names."""
    return Rule(
        megatron=megatron,
        dims=dims,
        hf=((hf, dims),),
        layout=RENAME,
        shard=shard,
        when=when,
        layers=layers,
        buffer=buffer,
        frozen=frozen,
    )


def vocab(megatron: str, hf: str, *, when: Callable[[Architecture], bool] = always) -> Rule:
    """A tensor with a row for each token; Megatron's has `vocab_padding` rows of zeros at its end."""
    return Rule(
        megatron=megatron,
        dims=("padded_vocab_size", "hidden_size"),
        hf=((hf, ("vocab_size", "hidden_size")),),
        layout=VOCAB,
        shard=Shard.ROWS,
        when=when,
        layers=every_layer,
    )


def fused_qkv(
    megatron: str,
    query: str,
    key: str,
    value: str,
    *,
    bias: bool = False,
    when: Callable[[Architecture], bool] = always,
) -> Rule:
    """Query, key and value in one; per query group, its heads' queries, then its key, then its value."""
    rest: Dims = () if bias else ("hidden_size",)
    return Rule(
        megatron=megatron,
        dims=("qkv_size", *rest),
        hf=(
            (query, ("query_size", *rest)),
            (key, ("key_value_size", *rest)),
            (value, ("key_value_size", *rest)),
        ),
        layout=QKV,
        shard=Shard.QKV_ROWS,
        when=when,
        layers=every_layer,
    )


def gated(
    megatron: str,
    gate: str,
    up: str,
    *,
    width: str = "ffn_hidden_size",
    fused: str = "gated_size",
    layers: Callable[[Architecture], Sequence[int]] = every_layer,
) -> Rule:
    """The gate and up projections of an MLP, one above the other; `width` is the rows of each, `fused` of both."""
    dims = (width, "hidden_size")
    return Rule(
        megatron=megatron,
        dims=(fused, "hidden_size"),
        hf=((gate, dims), (up, dims)),
        layout=GATED,
        shard=Shard.GATED_ROWS,
        when=always,
        layers=layers,
    )


def _pack_one(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    (tensor,) = parts
    return tensor


def _unpack_one(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    return (tensor,)


def _pack_vocab(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    (tensor,) = parts
    if architecture.vocab_padding == 0:
        return tensor
    padded = tensor.new_zeros(architecture.padded_vocab_size, *tensor.shape[1:])
    padded[: architecture.vocab_size] = tensor
    return padded


def _unpack_vocab(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    return (tensor[: architecture.vocab_size],)


def _pack_qkv(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    import torch

    groups, head_dim = architecture.num_query_groups, architecture.head_dim
    by_group = [part.reshape(groups, -1, head_dim, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 2)


def _unpack_qkv(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    groups, per_group = architecture.num_query_groups, architecture.heads_per_group
    by_group = tensor.reshape(groups, per_group + 2, architecture.head_dim, *tensor.shape[1:])
    query, key, value = by_group[:, :per_group], by_group[:, -2:-1], by_group[:, -1:]
    return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)


def _swap_halves(tensor: Tensor) -> Tensor:
    import torch

    left, right = tensor.chunk(2, dim=1)
    return torch.cat((right, left), dim=1)


def _pack_gated(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    import torch

    return torch.cat(tuple(parts))


def _unpack_gated(tensor: Tensor, architecture: Architecture) -> Sequence[Tensor]:
    return tensor.chunk(2)


#: One tensor, unchanged.
RENAME = WeightLayout("rename", _pack_one, _unpack_one)
#: One tensor, with rows of zeros at its end in Megatron.
VOCAB = WeightLayout("vocab", _pack_vocab, _unpack_vocab)
#: Query, key and value, interleaved by query group.
QKV = WeightLayout("qkv", _pack_qkv, _unpack_qkv)
#: Gate above up.
GATED = WeightLayout("gated", _pack_gated, _unpack_gated)
#: One matrix, the right half of its columns before the left one in Megatron.
HALVES_SWAPPED = WeightLayout(
    "halves swapped",
    lambda parts, architecture: _swap_halves(*parts),
    lambda tensor, architecture: (_swap_halves(tensor),),
)
