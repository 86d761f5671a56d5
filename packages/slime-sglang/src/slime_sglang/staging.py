"""An update in shared memory: all its tensors in one file, and a manifest that says what they must be.

The sender stages the whole update before the server touches its weights. So whatever is wrong with it is found while
the old weights are still whole, at the price of one copy of the weights in the host's memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from slime_core.errors import EngineError, WeightSyncError
from slime_models.fingerprint import fingerprint
from torch import Tensor

_ALIGNMENT = 64
_WEIGHTS, _MANIFEST, _VERDICT = "weights.bin", "manifest.json", "verdict.json"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, and its checksum."""

    offset: int
    """Bytes from the start of the file."""
    shape: Shape
    fingerprint: int


@dataclass(frozen=True)
class Verdict:
    """What the server made of an update."""

    error: str | None
    """Why it was refused, before anything was written; None when it was loaded."""
    held: Mapping[str, int]
    """Fingerprints of what the server's parameters hold after loading, by Hugging Face name."""


class Staging:
    """One folder of shared memory, written for every update anew.

    Args:
        folder: made if it is missing.
        shapes: Hugging Face name -> shape of every tensor of the model.
        dtype: of all of them.

    Raises:
        WeightSyncError: the weights do not fit into the folder's file system.
    """

    def __init__(self, folder: Path, *, shapes: Mapping[str, Shape], dtype: torch.dtype) -> None:
        self.folder, self._dtype = folder, dtype
        self._shapes, self._offsets = dict(shapes), dict[str, int]()
        end = 0
        for name, shape in shapes.items():
            self._offsets[name] = end
            end = _aligned(end + torch.Size(shape).numel() * dtype.itemsize)
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < end:
            raise WeightSyncError(
                f"{folder}: an update takes {end:,} bytes and {free:,} are free; enlarge the shared memory, or name "
                "another folder (--sglang-staging-dir)"
            )
        self._bytes = _mapped(folder / _WEIGHTS, n_bytes=end)
        self._entries: dict[str, Entry] = {}

    def begin(self) -> None:
        """Forget the last update."""
        self._entries = {}
        for old in self.folder.glob("*.json"):
            old.unlink()

    def put(self, name: str, tensor: Tensor, *, version: str) -> None:
        """Copy a tensor in.

        Raises:
            WeightSyncError: the model has no such tensor, it came before, or shape or dtype are others.
        """
        where = f"update to version {version}: {name}"
        shape = self._shapes.get(name)
        if shape is None:
            raise WeightSyncError(
                f"{where}: the engine's model has no such tensor; send its {len(self._shapes)} tensors only"
            )
        if name in self._entries:
            raise WeightSyncError(f"{where}: sent twice; send each tensor once")
        if tuple(tensor.shape) != shape:
            raise WeightSyncError(f"{where}: found shape {tuple(tensor.shape)}; wanted {shape}")
        if tensor.dtype != self._dtype:
            raise WeightSyncError(
                f"{where}: found dtype {tensor.dtype}; wanted {self._dtype}; cast it to the plan's dtype"
            )
        _view(self._bytes, self._offsets[name], shape, self._dtype).copy_(tensor)
        self._entries[name] = Entry(self._offsets[name], shape, fingerprint(tensor))

    def seal(self, *, version: str) -> None:
        """Write the manifest.

        Raises:
            WeightSyncError: names up to five tensors that were not put.
        """
        missing = sorted(self._shapes.keys() - self._entries.keys())
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(
                f"update to version {version}: {len(missing)} of {len(self._shapes)} tensors were not sent: {shown}"
            )
        manifest = {
            "version": version,
            "dtype": str(self._dtype).removeprefix("torch."),
            "entries": {name: asdict(entry) for name, entry in self._entries.items()},
        }
        (self.folder / _MANIFEST).write_text(json.dumps(manifest))

    def verdict(self) -> Verdict:
        """Return what the server said since this was last asked; see `read_verdict`."""
        return read_verdict(self.folder)

    def offer(self, name: str) -> Offer:
        """Return what is staged for one of several servers, under a name of its own."""
        return Offer(self.folder, name)

    def remove(self) -> None:
        """Free the memory."""
        del self._bytes
        shutil.rmtree(self.folder, ignore_errors=True)


class Offer:
    """A staged update for one of several servers: a folder for its verdict, over the same bytes.

    Args:
        staged: folder of the update.
        name: of the server.
    """

    def __init__(self, staged: Path, name: str) -> None:
        self.folder = staged / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for file in (_WEIGHTS, _MANIFEST):
            os.link(staged / file, self.folder / file)

    def verdict(self) -> Verdict:
        """Return what the server said since this was last asked; see `read_verdict`."""
        return read_verdict(self.folder)


def read_verdict(folder: Path) -> Verdict:
    """Return what a server said of the update in a folder since this was last asked.

    Raises:
        EngineError: it said nothing.
    """
    path = folder / _VERDICT
    if not path.exists():
        raise EngineError(f"{folder}: the server did not say what became of the update")
    verdict = Verdict(**json.loads(path.read_text()))
    path.unlink()
    return verdict


class Staged:
    """The update that lies in a folder, as the server reads it."""

    def __init__(self, folder: Path) -> None:
        manifest = json.loads((folder / _MANIFEST).read_text())
        self._folder, self._dtype = folder, getattr(torch, manifest["dtype"])
        self.version: str = manifest["version"]
        self.entries = {
            name: Entry(entry["offset"], tuple(entry["shape"]), entry["fingerprint"])
            for name, entry in manifest["entries"].items()
        }
        path = folder / _WEIGHTS
        self._bytes = _mapped(path, n_bytes=path.stat().st_size)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, a view of the shared memory."""
        for name, entry in self.entries.items():
            yield name, _view(self._bytes, entry.offset, entry.shape, self._dtype)

    def answer(self, verdict: Verdict) -> None:
        """Tell the sender."""
        (self._folder / _VERDICT).write_text(json.dumps(asdict(verdict)))


def _mapped(path: Path, *, n_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=n_bytes, dtype=torch.uint8)


def _view(memory: Tensor, offset: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + n_bytes].view(dtype).view(shape)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
