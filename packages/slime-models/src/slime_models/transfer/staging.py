"""Staged updates: the tensors of an update and a manifest with their checksums, in a folder of the engine's host.

An engine that loads an update only from such a folder finds whatever is wrong with it before a weight is written. The price is
one copy of the weights, however many servers: in shared memory, or on the disk for the transport `disk`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from slime_core.errors import DeltaBaseError, WeightSyncError
from slime_core.protocols import Fingerprint
from slime_core.weights.sync import Bucket
from torch import Tensor

from slime_models.hf.folder import HfCheckpoint
from slime_models.tensor_spec import Spec
from slime_models.transfer.changes import CHANGES, Encoding, apply_changes
from slime_models.transfer.fingerprint import fingerprints, fingerprints_of
from slime_models.transfer.manifest import (
    Entry,
    TensorCheck,
    UpdateManifest,
    aligned,
    check_manifest,
    read_manifest,
)
from slime_models.transfer.same_host import MemoryAddress, SharedWeights, address_of
from slime_models.transfer.threads import copy_all

#: File of a staging folder with the bytes of all tensors.
WEIGHTS = "weights.bin"
#: Encodings of tensors that are sent as changes.
_CHANGES: Mapping[str, Encoding] = {"xor": "xor", "overwrite": "overwrite"}


@dataclass(frozen=True, kw_only=True)
class StagedUpdate:
    """An update that is complete in a folder."""

    folder: Path
    manifest: UpdateManifest

    @property
    def version(self) -> str:
        """Its version."""
        return self.manifest.version

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprints that a server must hold after loading it, by Hugging Face name."""
        return {entry.name: entry.fingerprint for entry in self.manifest.entries}


class StagingFolder:
    """A folder in shared memory that holds all weights: rewritten by every update, or patched by a delta.

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
        self._places = {name: (self._offsets[name], spec.n_bytes) for name, spec in specs.items()}
        self._shared = SharedWeights(self._bytes, self._places)
        self._sealed: UpdateManifest | None = None

    @property
    def digest(self) -> str | None:
        """`UpdateManifest.digest` of what the folder holds; None where that is not known to be complete."""
        return None if self._sealed is None else self._sealed.digest

    def begin(self, version: str) -> None:
        """Begin an update, which overwrites the one that is there."""
        self.forget()
        self._version, self._entries = version, list[Entry]()
        self._check = TensorCheck(self._specs, version=version)

    def put(self, bucket: Bucket, sent: Fingerprint) -> None:
        """Copy a bucket in.

        Args:
            bucket: (name in the Hugging Face folder, tensor of the model's shape and dtype).
            sent: fingerprints as the sender computed them; those that it did not are computed here.

        Raises:
            WeightSyncError: the model has no such tensor, it came before, or shape or dtype are others; nothing was copied.
        """
        for name, tensor in bucket:
            self._check.see(name, tuple(tensor.shape), _name(tensor.dtype))
        copy_all([(self._view(name), tensor) for name, tensor in bucket])
        own = fingerprints_of((name, tensor) for name, tensor in bucket if name not in sent)
        for name, _ in bucket:
            self._note(name, own[name] if name in own else sent[name])

    def seal(self) -> StagedUpdate:
        """Write the manifest: the update is complete.

        Raises:
            WeightSyncError: names up to five tensors that were not put.
        """
        self._check.end()
        self._sealed = UpdateManifest(version=self._version, entries=self._entries)
        self._sealed.write(self.folder)
        return StagedUpdate(folder=self.folder, manifest=self._sealed)

    def apply(self, folder: Path, version: str) -> StagedUpdate:
        """Patch the weights by a folder of the transport `disk-delta`, and write the manifest.

        Raises:
            DeltaBaseError: the changes are to other weights than those here, which are not touched.
            WeightSyncError: a tensor is wrong, missing or damaged; names it.
        """
        manifest = read_manifest(folder)
        check_manifest(manifest, self._specs, version=version)
        self.begin_changes(manifest.base, version)
        with (folder / CHANGES).open("rb") as file:
            for entry in manifest.entries:
                file.seek(entry.offset)
                self.take(entry, file.read(entry.n_bytes))
        return self.seal()

    def begin_changes(self, base: str | None, version: str) -> None:
        """Begin an update of tensors and changes, which `take` takes one by one.

        Args:
            base: `digest` of the weights that the changes are to; None where none is to any.
            version: of the update.

        Raises:
            DeltaBaseError: other weights are here, which are not touched.
        """
        if base is not None and base != self.digest:
            raise DeltaBaseError(
                f"update to version {version}: its changes are to the weights {base}; the engine keeps "
                f"{self.digest or 'none'}"
            )
        self.begin(version)

    def adopt(self, manifest: UpdateManifest, version: str) -> StagedUpdate:
        """Return what was written to each tensor's `room` as an update, and write its manifest.

        Raises:
            WeightSyncError: it is of another version, or a tensor is unknown, missing or misshapen; names it.
        """
        check_manifest(manifest, self._specs, version=version)
        self.begin(version)
        for entry in manifest.entries:
            self._check.see(entry.name, entry.shape, entry.dtype)
            self._note(entry.name, entry.fingerprint)
        return self.seal()

    def room(self, name: str, n_bytes: int) -> Tensor | None:
        """Return the memory of a tensor, [n_bytes] uint8; None where the model has none of this name and size."""
        return self._shared.room(name, n_bytes)

    @property
    def address(self) -> MemoryAddress | None:
        """Where a sender on this machine finds the `room` of each tensor."""
        return address_of(self.folder / WEIGHTS, n_bytes=self.n_bytes, places=self._places)

    def forget(self) -> None:
        """Remove the manifests: what is there is no update any more."""
        self._sealed = None
        for old in self.folder.glob("*.json"):
            old.unlink()

    def take(self, entry: Entry, data: bytes | memoryview) -> None:
        """Apply the changes of a tensor, or copy it in.

        Raises:
            WeightSyncError: the model has no such tensor, it came before, or it is damaged; names it.
        """
        self._check.see(entry.name, entry.shape, entry.dtype)
        self._apply(entry, data)
        self._note(entry.name, entry.fingerprint)

    def _apply(self, entry: Entry, data: bytes | memoryview) -> None:
        where = f"update to version {self._version}: {entry.name}"
        if len(data) != entry.n_bytes:
            raise WeightSyncError(f"{where}: {len(data)} of {entry.n_bytes} bytes arrived; update again")
        view = self._view(entry.name)
        if (encoding := _CHANGES.get(entry.encoding)) is not None:
            apply_changes(view, data, n_changed=entry.n_changed or 0, encoding=encoding, name=where)
        elif entry.encoding == "whole" and len(data) == view.nbytes:
            if data:
                view.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        else:
            raise WeightSyncError(f"{where}: {len(data)} bytes of encoding {entry.encoding!r}; update again")

    def _note(self, name: str, checksum: int) -> None:
        spec = self._specs[name]
        entry = Entry(name=name, shape=spec.shape, dtype=spec.dtype, fingerprint=checksum)
        self._entries.append(replace(entry, offset=self._offsets[name], n_bytes=spec.n_bytes))

    def _view(self, name: str) -> Tensor:
        return self._specs[name].view(self._bytes, self._offsets[name])


class StagedTensors:
    """The tensors of a staged update, as an engine reads them: from a `StagingFolder`, or a folder of the transport `disk`.

    Args:
        folder: of the update.
        before: an earlier update, whose memory is used where it is that of this one, too: to map it anew, and unmap it, takes as
            long as a third of the copy.

    Raises:
        WeightSyncError: the folder has no manifest.
        CheckpointError: its weights are not complete.
    """

    def __init__(self, folder: Path, *, before: StagedTensors | None = None) -> None:
        self.folder = folder
        self.entries = {entry.name: entry for entry in read_manifest(folder).entries}
        path = folder / WEIGHTS
        self._tensors: Mapping[str, Tensor]
        self._memory: tuple[os.stat_result, Tensor] | None = None
        if path.exists():
            memory = self._mapped(path, None if before is None else before._memory)
            self._tensors = {
                name: entry.spec.view(memory, entry.offset) for name, entry in self.entries.items()
            }
        else:
            self._tensors = HfCheckpoint(folder)

    def _mapped(self, path: Path, before: tuple[os.stat_result, Tensor] | None) -> Tensor:
        file = path.stat()
        is_same = before is not None and os.path.samestat(before[0], file)
        memory = before[1] if before is not None and is_same else _mapped(path, n_bytes=file.st_size)
        self._memory = file, memory
        return memory

    @property
    def is_mapped(self) -> bool:
        """Whether it is the memory of a `StagingFolder`; else it is files, whose room on the disk is not free while they are open."""
        return self._memory is not None

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, a view of memory or of the file."""
        return self._tensors[name]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor."""
        for name in self.entries:
            yield name, self._tensors[name]

    def damaged(self, names: Sequence[str] | None = None) -> list[str]:
        """Return which tensors, of all or of some, are not those that were sent, by their fingerprints."""
        wanted = list(self.entries) if names is None else names
        found = fingerprints(self._tensors[name] for name in wanted)
        return [
            name for name, each in zip(wanted, found, strict=True) if each != self.entries[name].fingerprint
        ]


def _reserve(path: Path, *, n_bytes: int) -> None:
    """Allocate all bytes of a file: writing to mapped memory that the file system cannot provide kills the process."""
    try:
        with path.open("wb") as file:
            if n_bytes:
                os.posix_fallocate(file.fileno(), 0, n_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        raise WeightSyncError(
            f"{path.parent}: an update takes {n_bytes:,} bytes and {free:,} are free ({error.strerror}); make "
            "room there, or have the folder elsewhere: that of the engine torch is in the run's (--output-dir), that of sglang is "
            "--sglang-staging-dir"
        ) from error


def _mapped(path: Path, *, n_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=n_bytes, dtype=torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
