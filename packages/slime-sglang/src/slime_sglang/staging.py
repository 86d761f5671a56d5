"""An update that lies whole on the servers' host: its tensors, and a manifest that says what they must be.

Servers take an update only from such a folder, so whatever is wrong with it is found while the old weights are still
whole, at the price of one copy of the weights, however many servers: in shared memory, or on the disk for the transport
`disk`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from slime_core.errors import DeltaBaseError, WeightSyncError
from slime_core.protocols import Fingerprint
from slime_models.checkpoint import HfCheckpoint
from slime_models.fingerprint import fingerprint
from slime_models.transfer.delta import apply_changes
from slime_models.transfer.folders import CHANGES
from slime_models.transfer.manifest import (
    Entry,
    Manifest,
    Spec,
    TensorCheck,
    aligned,
    check_manifest,
    read_manifest,
)
from torch import Tensor

WEIGHTS = "weights.bin"


@dataclass(frozen=True, kw_only=True)
class Update:
    """An update that lies whole in a folder."""

    folder: Path
    manifest: Manifest

    @property
    def version(self) -> str:
        """Its version."""
        return self.manifest.version

    @property
    def fingerprint(self) -> Fingerprint:
        """What a server that has loaded it holds."""
        return {entry.name: entry.fingerprint for entry in self.manifest.entries}


class Staging:
    """One folder of shared memory, written for every update anew, or brought up to date by changes.

    Args:
        folder: made if it is missing.
        specs: every tensor of the model, by Hugging Face name.

    Raises:
        WeightSyncError: the weights do not fit into the folder's file system.
    """

    def __init__(self, folder: Path, *, specs: Mapping[str, Spec]) -> None:
        self.folder = folder
        self._specs, self._offsets = dict(specs), dict[str, int]()
        end = 0
        for name, spec in specs.items():
            self._offsets[name] = end
            end = aligned(end + spec.n_bytes)
        self.n_bytes = end
        folder.mkdir(parents=True, exist_ok=True)
        _reserve(folder / WEIGHTS, n_bytes=end)
        self._bytes = _mapped(folder / WEIGHTS, n_bytes=end)
        self._sealed: Manifest | None = None

    @property
    def digest(self) -> str | None:
        """What the folder holds (`Manifest.digest`); None where that is not known to be whole."""
        return None if self._sealed is None else self._sealed.digest

    def begin(self, version: str) -> None:
        """Begin an update; what was there is no update any more."""
        self.forget()
        self._version, self._entries = version, list[Entry]()
        self._check = TensorCheck(self._specs, version=version)

    def put(self, name: str, tensor: Tensor, said: int | None = None) -> None:
        """Copy a tensor in.

        Args:
            name: in the Hugging Face folder.
            tensor: of the model's shape and dtype.
            said: its fingerprint, as the sender found it; None where the sender does not say.

        Raises:
            WeightSyncError: the model has no such tensor, it came before, or shape or dtype are others.
        """
        shape = tuple(tensor.shape)
        self._check.see(name, shape, _name(tensor.dtype))
        self._view(name).copy_(tensor)
        self._note(name, fingerprint(tensor) if said is None else said)

    def seal(self) -> Update:
        """Write the manifest; the update is whole.

        Raises:
            WeightSyncError: names up to five tensors that were not put.
        """
        self._check.end()
        self._sealed = Manifest(version=self._version, entries=self._entries)
        self._sealed.write(self.folder)
        return Update(folder=self.folder, manifest=self._sealed)

    def apply(self, folder: Path, version: str) -> Update:
        """Bring the folder's weights up to date from a folder of the transport `disk-delta`, and write the manifest.

        Raises:
            DeltaBaseError: the changes are to other weights than those here, which stay as they are.
            WeightSyncError: a tensor is wrong, missing or damaged; names it.
        """
        manifest = read_manifest(folder)
        check_manifest(manifest, self._specs, version=version)
        if manifest.base is not None and manifest.base != self.digest:
            raise DeltaBaseError(
                f"update to version {version}: its changes are to the weights {manifest.base}; the engine keeps "
                f"{self.digest or 'none'}"
            )
        self.begin(version)
        with (folder / CHANGES).open("rb") as file:
            for entry in manifest.entries:
                file.seek(entry.offset)
                self._take(entry, file.read(entry.n_bytes))
                self._check.see(entry.name, entry.shape, entry.dtype)
                self._note(entry.name, entry.fingerprint)
        return self.seal()

    def adopt(self, manifest: Manifest, version: str) -> Update:
        """Take for an update what was received into the folder's file.

        Raises:
            WeightSyncError: it is of another version, or a tensor is unknown, missing or misshapen; names it.
        """
        check_manifest(manifest, self._specs, version=version)
        manifest.write(self.folder)
        if {entry.name: entry.offset for entry in manifest.entries} == self._offsets:
            self._sealed = manifest  # so that changes can be applied
        return Update(folder=self.folder, manifest=manifest)

    def forget(self) -> None:
        """Take what is there for no update."""
        self._sealed = None
        for old in self.folder.glob("*.json"):
            old.unlink()

    def _take(self, entry: Entry, data: bytes) -> None:
        where = f"update to version {self._version}: {entry.name}"
        if len(data) != entry.n_bytes:
            raise WeightSyncError(f"{where}: {len(data)} of {entry.n_bytes} bytes arrived; update again")
        view = self._view(entry.name)
        if entry.encoding == "xor" or entry.encoding == "overwrite":
            apply_changes(view, data, n_changed=entry.n_changed or 0, encoding=entry.encoding, name=where)
        elif entry.encoding == "whole" and len(data) == view.nbytes:
            if data:
                view.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        else:
            raise WeightSyncError(f"{where}: {len(data)} bytes of encoding {entry.encoding!r}; update again")

    def _note(self, name: str, said: int) -> None:
        spec = self._specs[name]
        entry = Entry(name=name, shape=spec.shape, dtype=spec.dtype, fingerprint=said)
        self._entries.append(replace(entry, offset=self._offsets[name], n_bytes=spec.n_bytes))

    def _view(self, name: str) -> Tensor:
        return _view(self._bytes, self._offsets[name], self._specs[name])


class Staged:
    """The update that lies in a folder, as the server reads it: of a `Staging`, or of the transport `disk`.

    Raises:
        WeightSyncError: the folder has no manifest.
        CheckpointError: its weights are not whole.
    """

    def __init__(self, folder: Path) -> None:
        self.entries = {entry.name: entry for entry in read_manifest(folder).entries}
        path = folder / WEIGHTS
        self._tensors: Mapping[str, Tensor]
        if path.exists():
            memory = _mapped(path, n_bytes=path.stat().st_size)
            self._tensors = {
                name: _view(memory, entry.offset, Spec(shape=entry.shape, dtype=entry.dtype))
                for name, entry in self.entries.items()
            }
        else:
            self._tensors = HfCheckpoint(folder)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, a view of memory or of the file."""
        return self._tensors[name]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor."""
        for name in self.entries:
            yield name, self._tensors[name]


def _reserve(path: Path, *, n_bytes: int) -> None:
    """Make a file whose bytes are all there: mapped memory that the file system cannot provide ends the process."""
    try:
        with path.open("wb") as file:
            if n_bytes:
                os.posix_fallocate(file.fileno(), 0, n_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        raise WeightSyncError(
            f"{path.parent}: an update takes {n_bytes:,} bytes and {free:,} are free ({error.strerror}); enlarge the "
            "shared memory, or name another folder (--sglang-staging-dir)"
        ) from error


def _mapped(path: Path, *, n_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=n_bytes, dtype=torch.uint8)


def _view(memory: Tensor, offset: int, spec: Spec) -> Tensor:
    return memory[offset : offset + spec.n_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
