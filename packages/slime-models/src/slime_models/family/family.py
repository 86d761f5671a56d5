"""`ModelFamily`: the weights of a Hugging Face model_type, converted in both directions. Group `slime.models`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from slime_core.errors import CheckpointError, WeightSyncError

from slime_models.family.architecture import Architecture
from slime_models.family.rules import LAYER, Rule
from slime_models.family.weights import Shape, Weight, numbered, weights_of

if TYPE_CHECKING:
    from torch import Tensor

#: The Hugging Face tensors that may be one.
EMBEDDING_WEIGHT, OUTPUT_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"
_EMBEDDING = "embedding.word_embeddings.weight"


@runtime_checkable
class Shaped(Protocol):
    """Weights that tell a tensor's shape at less cost than its numbers."""

    def shape(self, name: str) -> Shape:
        """Return the shape of one tensor."""
        ...


def _shape(hf: Mapping[str, Tensor], name: str) -> Shape:
    return hf.shape(name) if isinstance(hf, Shaped) else tuple(hf[name].shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    """A Hugging Face model_type: how its config is read, and the table of its weights.

    All methods take tensors of any dtype and device, change neither, and copy only where fusing demands it.
    """

    model_type: str
    """`model_type` in config.json, exactly."""
    rules: tuple[Rule, ...]
    """The weights, in the order in which they are sent."""
    architecture: Callable[[Mapping[str, Any]], Architecture]
    """Reads a parsed config.json; raises DataError, naming the field, for what is not supported."""
    ignored: tuple[str, ...] = ()
    """Tensors that old folders hold and nobody needs; names may contain `{layer}`."""
    mtp_prefix: str | None = None
    """Prefix of the Hugging Face names of a multi-token prediction (MTP) layer, with `{layer}` for its number, which follows
    those of the decoder, or `{mtp}` for one that counts from 0. Where the model does not have these layers, their tensors are copied unchanged into folders that
    are written."""
    carried: tuple[str, ...] = ()
    """Prefixes of the names of tensors that folders may have and the model has not, such as those of a vision tower or of MTP
    layers that cannot be trained. They are copied unchanged into folders that are written."""
    stacked: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """End of the name of a tensor in which some folders hold those of all experts, [experts, rows, columns] -> what an expert's
    parts of the rows are called in the rules: `{"mlp.experts.down_proj": ["down_proj.weight"]}`. Folders are written by the rules."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that an MTP layer has in folders and not in the model: suffix of the name -> the tensor that it is a copy of."""
    layers: str | None = None
    """`module:attribute` of the layers that the trainer builds, where `Architecture` does not say all of them: a
    `slime_megatron.model.family_layers.FamilyLayers`, imported when a model is built."""
    memory: str | None = None
    """`module:attribute` of what these layers keep for the backward pass, where it is not what `Architecture` says: a
    `slime_megatron.memory.family_memory.FamilyMemory`, imported without torch when memory is predicted."""
    decoder: str | None = None
    """`module:attribute` of the decoder that the engine `torch` builds, where `Architecture` does not say all of it: a
    `slime_torch.model.family_decoder.FamilyDecoder`, imported when an engine is built or asked whether it serves the model."""
    not_served: Mapping[str, str] = field(default_factory=dict)
    """Engine, by its entry point's name -> why it does not serve models of this family."""
    not_served_on_cpu: Mapping[str, str] = field(default_factory=dict)
    """The same of an engine that is refused where it would compute on a CPU alone."""
    not_updated: Mapping[str, str] = field(default_factory=dict)
    """The same of an engine that may serve them as their folder is, and is refused where a trainer would send it weights."""
    not_parallel: Mapping[str, str] = field(default_factory=dict)
    """Kind of parallelism (`tensor`, `sequence`, `pipeline`, `context`, `expert`, `expert_tensor`) -> why models of this family do not have it."""

    @functools.cached_property
    def embedding(self) -> str:
        """Hugging Face name of the embedding's tensor."""
        own = (rule.hf[0][0] for rule in self.rules if rule.megatron == _EMBEDDING)
        return next(own, EMBEDDING_WEIGHT)

    @functools.cached_property
    def _known(self) -> dict[Architecture, Mapping[str, Weight]]:
        """What `weights` has returned: looked up once or twice a tensor, where to compare all rules would take longer than the rest."""
        return {}

    @property
    def prefix(self) -> str:
        """Prefix of the Hugging Face names of all tensors of the decoder but the output layer's."""
        return self.embedding.removesuffix("embed_tokens.weight")

    def weights(self, architecture: Architecture) -> Mapping[str, Weight]:
        """Return Megatron name -> weight, for every Megatron tensor of a model, unsharded."""
        if (found := self._known.get(architecture)) is None:
            found = self._known[architecture] = weights_of(self.rules, architecture)
        return found

    def megatron_names(self, architecture: Architecture) -> tuple[str, ...]:
        """Return the names of all Megatron tensors."""
        return tuple(self.weights(architecture))

    def parameter_names(self, architecture: Architecture) -> tuple[str, ...]:
        """Return the names of those Megatron tensors that gradients train."""
        weights = self.weights(architecture).items()
        return tuple(name for name, weight in weights if not (weight.rule.buffer or weight.rule.frozen))

    def megatron_shapes(self, architecture: Architecture) -> dict[str, Shape]:
        """Return Megatron name -> shape."""
        return {name: weight.shape for name, weight in self.weights(architecture).items()}

    def hf_shapes(self, architecture: Architecture) -> dict[str, Shape]:
        """Return Hugging Face name -> shape, for every tensor that a folder of this model must hold."""
        return {
            name: shape for weight in self.weights(architecture).values() for name, shape in weight.hf.items()
        }

    def float32(self, architecture: Architecture) -> frozenset[str]:
        """Return the Hugging Face names of tensors that are float32 whatever the model's dtype."""
        return frozenset(
            name for weight in self.weights(architecture).values() if weight.rule.buffer for name in weight.hf
        )

    def passed_on(self, hf: Mapping[str, Tensor], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of those tensors in `hf`, `carried` or of MTP layers, that are not in the model.

        Copies of tensors that are in the model are not among them; see `with_copies`.
        """
        copies = self._originals(hf, architecture) if architecture.holds_mtp else {}
        for name in self.left_over(hf, architecture):
            if name not in copies:
                yield name, hf[name]

    def left_over(self, names: Iterable[str], architecture: Architecture) -> list[str]:
        """Return which names of a folder's tensors are `carried` or of MTP layers, and in no tensor of the model."""
        own = self.hf_shapes(architecture)
        return sorted(name for name in names if name not in own and self._may_be_left(name, architecture))

    def with_copies(
        self, tensors: Iterable[tuple[str, Tensor]], like: Iterable[str], architecture: Architecture
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each (name, tensor), and after it again under the names of its copies in a folder whose names are `like`.

        An MTP layer reads the model's embedding and output layer. Folders hold copies of these two among its tensors;
        they are updated only where the model has the MTP layer.
        """
        copies: dict[str, list[str]] = {}
        if architecture.holds_mtp:
            for copy, original in self._originals(like, architecture).items():
                copies.setdefault(original, []).append(copy)
        for name, tensor in tensors:
            yield name, tensor
            for copy in copies.get(name, ()):
                yield copy, tensor

    def has_mtp(self, names: Collection[str], architecture: Architecture) -> bool:
        """Return whether a folder with tensors of these names has all tensors of the MTP layers."""
        held = architecture.with_mtp()
        wanted = self.hf_shapes(held).keys() - self.hf_shapes(architecture.with_mtp(False)).keys()
        return bool(wanted) and all(name in names for name in wanted)

    def _originals(self, names: Iterable[str], architecture: Architecture) -> dict[str, str]:
        """Return those of the names that are copies -> what they are copies of."""
        found = {}
        for name in names:
            original = self.copies.get(self._within_mtp_layer(name, architecture) or "")
            if original is not None:
                tied = architecture.tie_word_embeddings and original == OUTPUT_WEIGHT
                found[name] = self.embedding if tied else original
        return found

    def _may_be_left(self, name: str, architecture: Architecture) -> bool:
        """Return whether a folder may have a tensor of this name that the model has not."""
        return name.startswith(self.carried) or self._within_mtp_layer(name, architecture) is not None

    def _within_mtp_layer(self, name: str, architecture: Architecture) -> str | None:
        """Return the part of a name after the prefix of an MTP layer; None where it is of no such layer."""
        first = architecture.num_layers
        for layer in range(first, first + architecture.mtp_num_layers):
            prefix = "" if self.mtp_prefix is None else numbered(self.mtp_prefix, layer, architecture)
            if prefix and name.startswith(prefix):
                return name.removeprefix(prefix)
        return None

    def weight(self, name: str, architecture: Architecture) -> Weight:
        """Return what the Megatron tensor `name` is made of, and how parallelism cuts it.

        Raises:
            WeightSyncError: the model has no such tensor.
        """
        weight = self.weights(architecture).get(name)
        if weight is None:
            tied = " with tied embeddings" if architecture.tie_word_embeddings else ""
            raise WeightSyncError(
                f"{name}: no Megatron tensor of a {self.model_type} model"
                f" of {architecture.num_layers} layers{tied}"
            )
        return weight

    def to_megatron(
        self, hf: Mapping[str, Tensor], architecture: Architecture
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every Megatron tensor (name, unsharded tensor), reading `hf` lazily, one weight at a time.

        Raises:
            CheckpointError: `hf` lacks a tensor, has an unknown one, or one of another shape; names it.
        """
        self.check_names(hf, architecture)
        for weight in self.weights(architecture).values():
            yield weight.megatron, self._packed(weight, hf, architecture)

    def to_megatron_tensor(self, name: str, hf: Mapping[str, Tensor], architecture: Architecture) -> Tensor:
        """Return the one Megatron tensor `name`, unsharded, reading from `hf` only what it holds.

        Raises:
            WeightSyncError: the model has no such tensor.
            CheckpointError: `hf` lacks a tensor, or has one of another shape; names it.
        """
        weight = self.weight(name, architecture)
        missing = [hf_name for hf_name in weight.hf if hf_name not in hf]
        if missing:
            raise CheckpointError(
                f"{self.model_type} weights: {_listing(missing)} missing; wanted for {name}"
            )
        return self._packed(weight, hf, architecture)

    def to_hf(self, name: str, tensor: Tensor, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face tensors (name, tensor) that the unsharded Megatron tensor `name` holds.

        Of a tensor that folders hold of all experts together, it is this expert's part, [1, ...]; see `hf_tensors`.

        Raises:
            WeightSyncError: the model has no such tensor, or its shape is another.
        """
        weight = self.weight(name, architecture)
        if tuple(tensor.shape) != weight.shape:
            raise WeightSyncError(
                f"{name}: found shape {tuple(tensor.shape)}; wanted {weight.shape} "
                f"({' x '.join(weight.rule.dims)}); gather tensor-parallel shards first"
            )
        for hf_name, part in zip(weight.hf, weight.rule.layout.unpack(tensor, architecture), strict=True):
            yield hf_name, part[None] if weight.rule.stacked else part

    def hf_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], architecture: Architecture
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face tensors that unsharded Megatron tensors hold, given as (name, tensor) in the order of `weights`.

        Where folders hold the tensors of all experts as one, that one is held until its last expert has come.

        Raises:
            WeightSyncError: as `to_hf`.
        """
        stacks: dict[str, Tensor] = {}
        for name, tensor in tensors:
            weight = self.weight(name, architecture)
            for hf_name, part in self.to_hf(name, tensor, architecture):
                if not weight.rule.stacked:
                    yield hf_name, part
                    continue
                if hf_name not in stacks:
                    stacks[hf_name] = part.new_empty(weight.hf[hf_name])
                stacks[hf_name][weight.expert] = part[0]
                if weight.expert == len(stacks[hf_name]) - 1:
                    yield hf_name, stacks.pop(hf_name)

    def check_names(self, names: Iterable[str], architecture: Architecture) -> None:
        """Check that Hugging Face names are those of a model: none missing, none unknown.

        Raises:
            CheckpointError: names up to five of either.
        """
        found, wanted = set(names), set(self.hf_shapes(architecture))
        layers = range(architecture.num_layers)
        optional = {name.replace(LAYER, str(layer)) for name in self.ignored for layer in layers}
        if architecture.tie_word_embeddings:
            optional.add(OUTPUT_WEIGHT)
        optional |= {name for name in found - wanted if self._may_be_left(name, architecture)}
        missing, unknown = sorted(wanted - found), sorted(found - wanted - optional)
        if missing or unknown:
            parts = [
                f"{_listing(names)} {what}"
                for names, what in ((missing, "missing"), (unknown, "unknown"))
                if names
            ]
            raise CheckpointError(
                f"{self.model_type} weights: {'; '.join(parts)}; wanted the {len(wanted)} tensors of "
                f"{architecture.num_layers} layers (num_hidden_layers): config.json and the weights are not of one model"
            )

    def check_weights(self, hf: Mapping[str, Tensor], architecture: Architecture) -> None:
        """Check that weights are those that config.json describes: their names, their shapes, and what is tied.

        Raises:
            CheckpointError: names the tensor, and the field of config.json that it contradicts.
        """
        if not architecture.tie_word_embeddings and OUTPUT_WEIGHT not in hf and self.embedding in hf:
            raise CheckpointError(
                f"config.json: tie_word_embeddings: found false, and the weights have no {OUTPUT_WEIGHT}; set it to "
                "true if the output layer is the embedding, else fetch the folder again"
            )
        self.check_names(hf, architecture)
        for weight in self.weights(architecture).values():
            weight.check_shapes([_shape(hf, name) for name in weight.hf])
        if (
            architecture.tie_word_embeddings
            and OUTPUT_WEIGHT in hf
            and not hf[OUTPUT_WEIGHT].equal(hf[self.embedding])
        ):
            raise CheckpointError(
                f"config.json: tie_word_embeddings: found true, and {OUTPUT_WEIGHT} is not {self.embedding}; set it "
                "to false, or drop the tensor if the embedding is to be the output layer"
            )

    def _packed(self, weight: Weight, hf: Mapping[str, Tensor], architecture: Architecture) -> Tensor:
        parts = [hf[name] for name in weight.hf]
        weight.check_shapes([tuple(part.shape) for part in parts])
        if weight.rule.stacked:
            parts = [part[weight.expert] for part in parts]
        return weight.rule.layout.pack(parts, architecture)


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
