"""Megatron's `torch_dist` checkpoints of weights, read and written a tensor at a time. Imports torch, and not megatron.

Such a folder is torch's own distributed checkpoint. Tensors of all layers are stored under one name, along a first dimension
of layers, those of experts along a second one; where layers differ, some with experts and some without, each has names of
its own. A norm before a linear layer is named after that layer. Folders that others wrote may have names for each layer, and
of norms, where ours have not (`CheckpointKey.candidates`). How the tensors were sharded when they were written does not matter.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import CheckpointError
from slime_models.family.architecture import Architecture
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slime_megatron.checkpoint.unpickling import TorchDistReader, first_line
from slime_megatron.model.lora_math import A, B, merge
from slime_megatron.model.parameters import MTP

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
#: Norms, and the linear layers that checkpoints name them after.
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_LINEAR = re.compile(r"\.layers\..*\.(linear_\w+|eh_proj)\.weight$")
#: The decoder layer within an MTP layer: its name in a model, and in a checkpoint.
_WITHIN, _STORED_WITHIN = "mtp_model_layer.", "transformer_layer."
#: What Megatron's layers save beside their weights where they have nothing to save.
_NO_STATE = [None]
#: The output layer's weight, or in its place a critic's head, [1, hidden_size].
HEAD = "output_layer.weight"
#: Rows of these are ids; a checkpoint may have more of them than the model: padding.
_OF_IDS = ("embedding.word_embeddings.weight", HEAD)


@dataclass(frozen=True)
class CheckpointKey:
    """The name under which a checkpoint stores a tensor of the model, and its index there."""

    name: str
    """Name in the checkpoint, under which those of other layers and experts are stored, too."""
    indices: tuple[int, ...] = ()
    """Index of its layer, and of its expert, along the first dimensions."""
    counts: tuple[int, ...] = ()
    """Number of layers, and of experts: the sizes of these dimensions."""

    @classmethod
    def of(cls, name: str, architecture: Architecture) -> CheckpointKey:
        """Return the key under which the tensor `name` of the whole model is written."""
        return next(cls.candidates(name, architecture))

    @classmethod
    def candidates(cls, name: str, architecture: Architecture) -> Iterator[CheckpointKey]:
        """Yield the keys under which a folder may have the tensor `name` of the whole model, first that under which it is written.

        Source: Megatron 0.19.2, `TransformerBlock.sharded_state_dict`, which stores layers one by one where `moe_layer_freq` is a list,
        also one of ones alone; and `gpt_layer_specs.py`, where TransformerEngine's layers with experts have a norm of their own before
        them, and local layers name it after a linear layer as if it were in that. Experts are stored alike, in groups or one by one.
        """
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        if layer is None:
            yield cls(name)
            return
        rest, inner = name[layer.end() :], ""
        if rest.startswith(_WITHIN):
            rest, inner = rest.removeprefix(_WITHIN), _STORED_WITHIN
        n_experts: tuple[int, ...] = ()
        if expert is not None:
            assert architecture.num_moe_experts is not None
            rest, n_experts = _EXPERT.sub(".experts.experts.", rest), (architecture.num_moe_experts,)
        own_expert = () if expert is None else (int(expert[1]),)
        alone = cls(f"{layer[1]}.layers.{layer[2]}.{inner}", own_expert, n_experts)
        places = [alone]
        if architecture.has_like_layers and layer[1] == "decoder":
            indices, counts = (int(layer[2]), *own_expert), (architecture.num_layers, *n_experts)
            places.insert(0, cls("decoder.layers.", indices, counts))
        for place in places:
            for spelled in _spellings(rest):
                yield replace(place, name=place.name + spelled)

    @property
    def extra_state(self) -> str:
        """Name of what Megatron saves beside the weight."""
        stem = self.name.removesuffix("weight")
        numbers, counts = (
            ".".join(map(str, values)) for values in (self.indices or (0,), self.counts or (1,))
        )
        return f"{stem}_extra_state/shard_{numbers}_{counts}"


def _spellings(rest: str) -> Iterator[str]:
    """Yield the names that a tensor within a layer may have: a norm is named after the linear layer behind it, or by itself."""
    for norm, key in _NORMS.items():
        if rest.startswith(norm):
            yield key + rest.removeprefix(norm)
    yield rest


class StoredWeights:
    """The tensors of a checkpoint's model, read when they are asked for.

    Args:
        folder: with `.metadata` and the files that it lists.
        architecture: of the model.

    Raises:
        CheckpointError: it is no such folder, or has more layers than the model.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._folder, self._architecture = folder, architecture
        self._reader = TorchDistReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._check_layers()

    def _check_layers(self) -> None:
        """Refuse layers with names of their own that the model has not: each name alone does not tell how many there are."""
        layers = (_LAYER.search(name) for name in self._metadata.state_dict_metadata)
        last = max(
            (int(layer[2]) for layer in layers if layer is not None and layer[1] == "decoder"), default=0
        )
        if last >= (n := self._architecture.num_layers):
            raise CheckpointError(
                f"{self._folder}: has decoder.layers.{last}; wanted {n} layers, by config.json"
            )

    @property
    def holds_mtp(self) -> bool:
        """Whether it has MTP layers."""
        return any(name.startswith(MTP) for name in self._metadata.state_dict_metadata)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the shape of what is stored under a key, without reading it; None where there is no such tensor."""
        stored = self._metadata.state_dict_metadata.get(key)
        return tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that the tensor `name` of the whole model is there, with this shape, without reading it; raises as `read` does."""
        self._found(name, shape)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor `name` of the whole model, in the dtype that it was saved in.

        Raises:
            CheckpointError: it is not there, or has another shape; names it.
        """
        key, stored = self._found(name, shape)
        whole = torch.empty(shape, dtype=stored.properties.dtype)
        part = ChunkStorageMetadata(
            offsets=torch.Size((*key.indices, *(0 for _ in shape))),
            sizes=torch.Size((*(1 for _ in key.indices), *shape)),
        )
        items = create_read_items_for_chunk_list(key.name, stored, [part])
        if sum(item.lengths.numel() for item in items) < whole.numel():
            raise CheckpointError(f"{self._folder}: has parts of {key.name} only; wanted all of it")
        try:
            self._reader.read_data(LoadPlan(items), _SingleTensorLoadPlanner(whole.view(part.sizes))).wait()
        except Exception as error:  # what is raised depends on what is damaged, and how
            raise CheckpointError(
                f"{self._folder}: {key.name} cannot be read: {first_line(error)}"
            ) from error
        return whole

    def _located(self, name: str) -> tuple[CheckpointKey, TensorStorageMetadata] | None:
        """Return where the tensor `name` of the whole model is; None where it is not there."""
        for key in CheckpointKey.candidates(name, self._architecture):
            stored = self._metadata.state_dict_metadata.get(key.name)
            if isinstance(stored, TensorStorageMetadata):
                return key, stored
        return None

    def _found(self, name: str, shape: tuple[int, ...]) -> tuple[CheckpointKey, TensorStorageMetadata]:
        if (located := self._located(name)) is None:
            keys = " or ".join(key.name for key in CheckpointKey.candidates(name, self._architecture))
            raise CheckpointError(
                f"{self._folder}: has no {keys}; wanted the weights of a {self._architecture.model_type} model, by config.json"
            )
        key, stored = located
        sizes = (*key.counts, *shape)
        found = tuple(stored.size)
        fits = found[1:] == sizes[1:] and found[0] >= sizes[0] if name in _OF_IDS else found == sizes
        if not fits:
            raise CheckpointError(
                f"{self._folder}: {key.name} has shape {found}; wanted {sizes}, by config.json"
            )
        return key, stored

    def merged(self, name: str, weight: Tensor, *, rank: int, scale: float) -> Tensor:
        """Return a weight with its adapter of that rank merged in, itself where it has none."""
        stem = name.removesuffix("weight")
        if self._located(stem + A) is None:
            return weight
        rows, columns = weight.shape
        a, b = self.read(stem + A, (rank, columns)), self.read(stem + B, (rows, rank))
        return merge(weight, a, b, scale)


class _SingleTensorLoadPlanner(DefaultLoadPlanner):
    """Reads parts into one tensor."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self._whole = whole

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._whole[tuple(slice(first, first + n) for first, n in ranges)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: it was read into its key."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def write_weights(folder: Path, tensors: Mapping[str, LazyTensor], architecture: Architecture) -> None:
    """Write a whole model into an existing, empty folder, holding one tensor at a time.

    Args:
        folder: that Megatron's `dist_checkpointing.load` reads afterwards, under any parallel layout.
        tensors: by the names of the whole model.
        architecture: of the model.

    Raises:
        CheckpointError: it cannot be written, or a tensor cannot be made.
    """
    planner = _LazySavePlanner(tensors, architecture)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process alone writes
            # with CUDA torch makes tensors of 10 MB ahead of what it writes, as if they were to be copied from there
            writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
            save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{folder}: cannot be written: {type(cause).__name__}: {cause}") from error
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )


class _LazySavePlanner(SavePlanner):
    """Plans all tensors by their shapes, and makes each when it is its turn."""

    def __init__(self, tensors: Mapping[str, LazyTensor], architecture: Architecture) -> None:
        self._tensors = {CheckpointKey.of(name, architecture): tensor for name, tensor in tensors.items()}
        self._made: dict[MetadataIndex, LazyTensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing to do: there is no state but the tensors."""

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for key, tensor in self._tensors.items():
            chunk = ChunkStorageMetadata(
                offsets=torch.Size((*key.indices, *(0 for _ in tensor.shape))),
                sizes=torch.Size((*(1 for _ in key.indices), *tensor.shape)),
            )
            data = TensorWriteData(
                chunk=chunk,
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size((*key.counts, *tensor.shape)),
            )
            index = MetadataIndex(key.name, chunk.offsets)
            self._made[index] = tensor
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
            if _LINEAR.search(key.name):
                items.append(WriteItem(index=MetadataIndex(key.extra_state), type=WriteItemType.BYTE_IO))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.tensor_data is None:
            state = io.BytesIO()
            torch.save(_NO_STATE, state)
            return state
        tensor = self._made[write_item.index].make()
        return tensor.reshape(write_item.tensor_data.chunk.sizes).contiguous()
