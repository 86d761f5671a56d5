"""Megatron's `torch_dist` checkpoints of weights, read and written a tensor at a time. Imports torch, and not megatron.

Such a folder is torch's own distributed checkpoint. Tensors of all layers are stored under one name, along a first dimension
of layers, those of experts along a second one; where layers differ, some with experts and some without, each has names of
its own. A norm before a linear layer is named after that layer. How the tensors were sharded when they were written does
not matter.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        """Return the key of the tensor `name` of the whole model."""
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        if layer is None:
            return cls(name)
        rest, inner = name[layer.end() :], ""
        if rest.startswith(_WITHIN):
            rest, inner = rest.removeprefix(_WITHIN), _STORED_WITHIN
        for norm, key in _NORMS.items():
            rest = key + rest.removeprefix(norm) if rest.startswith(norm) else rest
        stem = "decoder.layers."
        indices: tuple[int, ...] = (int(layer[2]),)
        counts: tuple[int, ...] = (architecture.num_layers,)
        if not architecture.has_like_layers or layer[1] == "mtp":  # not alike: each has a name of its own
            stem, indices, counts = f"{layer[1]}.layers.{layer[2]}.{inner}", (), ()
        if expert is not None:
            assert architecture.num_moe_experts is not None
            rest = _EXPERT.sub(".experts.experts.", rest)
            indices, counts = (*indices, int(expert[1])), (*counts, architecture.num_moe_experts)
        return cls(stem + rest, indices, counts)

    @property
    def extra_state(self) -> str:
        """Name of what Megatron saves beside the weight."""
        stem = self.name.removesuffix("weight")
        numbers, counts = (
            ".".join(map(str, values)) for values in (self.indices or (0,), self.counts or (1,))
        )
        return f"{stem}_extra_state/shard_{numbers}_{counts}"


class StoredWeights:
    """The tensors of a checkpoint's model, read when they are asked for.

    Args:
        folder: with `.metadata` and the files that it lists.
        architecture: of the model.

    Raises:
        CheckpointError: it is no such folder.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._folder, self._architecture = folder, architecture
        self._reader = TorchDistReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

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

    def _found(self, name: str, shape: tuple[int, ...]) -> tuple[CheckpointKey, TensorStorageMetadata]:
        key = CheckpointKey.of(name, self._architecture)
        stored = self._metadata.state_dict_metadata.get(key.name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"{self._folder}: has no {key.name}; wanted the weights of a {self._architecture.model_type} model, "
                "by config.json"
            )
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
        if (
            f"{CheckpointKey.of(name, self._architecture).name.removesuffix('weight')}{A}"
            not in self._metadata.state_dict_metadata
        ):
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
