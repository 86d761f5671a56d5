"""Transport `disk-delta`: a folder with what changed since the last update, or with everything, applied to the staged copy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket
from torch import Tensor

from slime_models.hf.folder import new_folder
from slime_models.transfer.changes import CHANGES, Encoding, encode_changes
from slime_models.transfer.manifest import Entry, UpdateManifest, entries_of
from slime_models.transfer.staging import StagedUpdate
from slime_models.transfer.storage import UpdateStorage, appears
from slime_models.transfer.transport import OnThread, Transport, UpdateOnThread


@dataclass(frozen=True, kw_only=True)
class DeltaChannel:
    """Transport `disk-delta`: a folder with changes, or with everything, which appears whole."""

    folder: Path
    """Folder to be made, on a file system that both sides see."""
    base: str | None
    """`UpdateManifest.digest` of the weights that the receiver would apply changes to; None if it has none."""
    encoding: Encoding


class LastSent:
    """A copy, in the sender's host memory, of the weights that were sent last."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.digest: str | None = None

    def forget(self) -> None:
        """Free the memory."""
        self.tensors, self.digest = {}, None


class Changes:
    """What changed since the last update, or all weights where the receiver's are not those sent last.

    Args:
        last: what was sent last, which is not known to be anything from here to `end`.
        base: `UpdateManifest.digest` of the receiver's weights; None if it has none.
        encoding: of changes.
        version: of the update.
    """

    def __init__(self, last: LastSent, *, base: str | None, encoding: Encoding, version: str) -> None:
        self._last, self._encoding, self._version = last, encoding, version
        self._entries: list[Entry] = []
        self._end = 0
        self.base = last.digest if last.digest == base else None
        """Digest of the weights that the changes are to; None where all weights are sent."""
        if self.base is None:
            last.forget()
        last.digest = None

    def encode(self, bucket: Bucket, fingerprints: Fingerprint) -> Iterator[tuple[Entry, bytes | memoryview]]:
        """Yield the entry of each tensor, and its bytes: changes, or all of it."""
        for (name, tensor), entry in zip(bucket, entries_of(bucket, fingerprints), strict=True):
            new = tensor.detach().to("cpu").contiguous()
            old = self._last.tensors.get(name)
            encoding, n_changed = "whole", None
            data: bytes | memoryview
            if self.base is not None and old is not None and (old.shape, old.dtype) == (new.shape, new.dtype):
                encoding = self._encoding
                data, n_changed = encode_changes(old, new, self._encoding)
                old.copy_(new)
            else:
                self._last.tensors[name] = new.clone()
                data = memoryview(new.reshape(-1).view(torch.uint8).numpy())
            sent = dataclasses.replace(
                entry, offset=self._end, n_bytes=len(data), encoding=encoding, n_changed=n_changed
            )
            self._entries.append(sent)
            self._end += len(data)
            yield sent, data

    def end(self) -> UpdateManifest:
        """Return the manifest: these weights are now the base of the next update."""
        manifest = UpdateManifest(version=self._version, entries=self._entries, base=self.base)
        self._last.digest = manifest.digest
        return manifest


class DeltaWriter:
    """Writes `Changes` into a folder. A context manager."""

    def __init__(self, plan: TransferPlan, last: LastSent) -> None:
        self._channel: DeltaChannel = plan.channel
        self._version, self._last = plan.version, last
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> DeltaWriter:
        """Make the folder under a temporary name."""
        base, encoding = self._channel.base, self._channel.encoding
        self._changes = Changes(self._last, base=base, encoding=encoding, version=self._version)
        self.folder = self._exit.enter_context(new_folder(self._channel.folder))
        self._file: IO[bytes] = self._exit.enter_context((self.folder / CHANGES).open("wb"))
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Write a bucket's changes."""
        return sum(self._file.write(data) for _, data in self._changes.encode(bucket, fingerprints))

    def end(self) -> None:
        """Write the manifest; these weights are now the base of the next update."""
        self._changes.end().write(self.folder)

    def __exit__(self, *error: object) -> None:
        """Rename the finished folder to its final name, or remove it after an error."""
        self._exit.__exit__(*error)  # type: ignore[arg-type]  # handed through as they came


class DeltaSender:
    """The sending half of `disk-delta`, which remembers what it sent last."""

    def __init__(self, on_thread: OnThread) -> None:
        """Need no thread of the trainer's."""
        self.last = LastSent()

    def update(self, plan: TransferPlan) -> UpdateOnThread:
        """Return the update of a plan, not begun."""
        return UpdateOnThread(DeltaWriter(plan, self.last))


class DeltaReceiver:
    """The receiving half of `disk-delta`: applies changes to the copy in the staging folder."""

    def __init__(self, storage: UpdateStorage) -> None:
        self._storage = storage

    def open(self, version: str) -> DeltaChannel:
        """Return where to write, and what changes would be applied to."""
        storage = self._storage
        return DeltaChannel(
            folder=storage.new_folder(version), base=storage.staging.digest, encoding=storage.encoding
        )

    async def arrive(self, plan: TransferPlan) -> StagedUpdate:
        """Wait for the folder, and apply its changes."""
        storage, folder = self._storage, plan.channel.folder
        await appears(folder)
        update: StagedUpdate = await storage.on_thread(storage.staging.apply, folder, plan.version)
        return update

    def give_up(self, plan: TransferPlan) -> None:
        """Do nothing: the sender does not wait."""


#: The entry point `disk-delta` of `slime.transports`.
TRANSPORT = Transport(name="disk-delta", create_sender=DeltaSender, create_receiver=DeltaReceiver)
