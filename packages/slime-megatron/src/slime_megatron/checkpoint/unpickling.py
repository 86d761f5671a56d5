"""Safe unpickling of `torch_dist` folders: nothing in them can run code. Imports torch, and not megatron.

Such a folder has an index, `.metadata`, which is a pickle, and torch reads it and every object beside the tensors by an
unpickler that calls whatever it finds there. Here the index may name what an index consists of and nothing else, and
objects go through torch's own restricted unpickler.
"""

from __future__ import annotations

import io
import pickle
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from slime_core.errors import CheckpointError
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata, planner
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

#: Of the text of an error, which may name every tensor of a folder.
_MOST_CHARACTERS = 400
_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo)}


def _as_text(*parts: str) -> str:
    """Stand for a path: the class of paths is no part of an index, and its attributes could be written to."""
    return "/".join(parts)


#: What an index may name, by (module, name), and what it gets; data types of torch come on top.
_NAMED: dict[tuple[str, str], Any] = {
    **{
        (module.__name__, name): getattr(module, name)
        for module, names in (
            (
                metadata,
                "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
                "TensorStorageMetadata _MEM_FORMAT_ENCODING",
            ),
            (planner, "LoadItemType LoadPlan ReadItem SavePlan TensorWriteData WriteItem WriteItemType"),
            (filesystem, "_StorageInfo"),
        )
        for name in names.split()
    },
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _as_text,
    ("pathlib._local", "PosixPath"): _as_text,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _NAMED.get((module, name))
        if found is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            found = vars(torch)[name]
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index consists of")
        return found


def read_index(path: Path) -> Metadata:
    """Return the index of a folder.

    Raises:
        CheckpointError: it cannot be read, is no index, or names files outside of its folder; nothing of it was called.
    """
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"it is of the type {type(index).__name__}")
        files = {str(stored.relative_path) for stored in index.storage_data.values()}
        if outside := sorted(name for name in files if Path(name).name != name or name == ".."):
            raise pickle.UnpicklingError(f"it names the file {outside[0]!r}")
        if not isinstance(index.state_dict_metadata, dict):
            raise pickle.UnpicklingError("it lists no tensors")
    except Exception as error:  # what is raised depends on what is damaged, and how
        raise CheckpointError(
            f"{path}: cannot be read as the index of a torch_dist folder: {first_line(error)}; wanted one that torch wrote"
        ) from error
    return index


def first_line(error: BaseException) -> str:
    """Return what an error says, in a line: before what it refused, torch explains at length how to allow it."""
    lines = str(error).strip().splitlines() or [""]
    line = next((line for line in lines if "GLOBAL" in line or "Unpickler" in line), lines[0])
    return textwrap.shorten(f"{type(error).__name__}: {line}", _MOST_CHARACTERS, placeholder=" ...")


def read_metadata(reader: FileSystemReader, *_: Any, rank: int | None = None, **__: Any) -> Metadata:
    """Take the place of `FileSystemReader.read_metadata`."""
    index = read_index(Path(reader._get_metadata_path(rank)))
    if not isinstance(index.storage_meta, StorageMeta):
        index.storage_meta = StorageMeta()
    index.storage_meta.load_id = reader.load_id
    return index


def load_bytes(own: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Take the place of `DefaultLoadPlanner.load_bytes`: objects are tensors, plain values, and what Megatron allows."""
    loaded, name = torch.load(value, weights_only=True), read_item.dest_index.fqn
    if own.flatten_state_dict:
        set_element(own.original_state_dict, own.mappings[name], loaded)
    else:
        own.state_dict[name] = loaded


class TorchDistReader(FileSystemReader):
    """Reads a `torch_dist` folder that need not be trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index; see `read_index`."""
        return read_metadata(self, *args, **kwargs)
