"""Updates as folders that appear whole: writing them for the transports `disk` and `disk-delta`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import IO

import torch
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights import Bucket
from torch import Tensor

from slime_models.checkpoint import WeightFiles, copy_other_files, new_folder
from slime_models.transfer.channels import DeltaChannel, DiskChannel
from slime_models.transfer.delta import encode_changes
from slime_models.transfer.manifest import Entry, Manifest, bytes_of, entries_of

#: File of changes in a folder of the transport `disk-delta`.
CHANGES = "changes.bin"


class DiskWriter:
    """Writes a Hugging Face folder and the update's manifest, a file for each bucket. A context."""

    def __init__(self, plan: TransferPlan) -> None:
        self._channel: DiskChannel = plan.channel
        self._version, self._entries = plan.version, list[Entry]()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> DiskWriter:
        """Make the folder under another name."""
        self._folder = self._exit.enter_context(new_folder(self._channel.folder))
        self._files = WeightFiles(self._folder)
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Write a bucket."""
        self._files.write(dict(bucket))
        self._entries += entries_of(bucket, fingerprints)
        return bytes_of(bucket)

    def end(self) -> None:
        """Write what goes with the weights."""
        copy_other_files(self._channel.config_from, self._folder)
        self._files.finish()
        Manifest(version=self._version, entries=self._entries).write(self._folder)

    def __exit__(self, *error: object) -> None:
        """Give the folder its name, or remove it after an error."""
        self._exit.__exit__(*error)  # type: ignore[arg-type]  # handed through as they came


class LastSent:
    """The weights that were sent last by `disk-delta`, in the sender's memory: one copy of them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.digest: str | None = None

    def forget(self) -> None:
        """Free the memory."""
        self.tensors, self.digest = {}, None


class DeltaWriter:
    """Writes what changed since the last update, or everything where the receiver holds something else. A context."""

    def __init__(self, plan: TransferPlan, last: LastSent) -> None:
        self._channel: DeltaChannel = plan.channel
        self._version, self._entries, self._last = plan.version, list[Entry](), last
        self._base = last.digest if last.digest == self._channel.base else None
        self._exit = contextlib.ExitStack()
        self._end = 0

    def __enter__(self) -> DeltaWriter:
        """Make the folder under another name."""
        if self._base is None:
            self._last.forget()
        self._last.digest = None  # until all of it is there
        self._folder = self._exit.enter_context(new_folder(self._channel.folder))
        self._file: IO[bytes] = self._exit.enter_context((self._folder / CHANGES).open("wb"))
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Write a bucket's changes."""
        begin = self._end
        for (name, tensor), entry in zip(bucket, entries_of(bucket, fingerprints), strict=True):
            new = tensor.detach().to("cpu").contiguous()
            old = self._last.tensors.get(name)
            n_changed: int | None = None
            if (
                self._base is not None
                and old is not None
                and (old.shape, old.dtype) == (new.shape, new.dtype)
            ):
                encoding: str = self._channel.encoding
                data: bytes | memoryview
                data, n_changed = encode_changes(old, new, self._channel.encoding)
                old.copy_(new)
            else:
                encoding, data = "whole", memoryview(new.reshape(-1).view(torch.uint8).numpy())
                self._last.tensors[name] = new.clone()
            self._file.write(data)
            self._entries.append(
                dataclasses.replace(
                    entry, offset=self._end, n_bytes=len(data), encoding=encoding, n_changed=n_changed
                )
            )
            self._end += len(data)
        return self._end - begin

    def end(self) -> None:
        """Write the manifest; the weights are the base of the next update from now on."""
        manifest = Manifest(version=self._version, entries=self._entries, base=self._base)
        manifest.write(self._folder)
        self._last.digest = manifest.digest

    def __exit__(self, *error: object) -> None:
        """Give the folder its name, or remove it after an error."""
        self._exit.__exit__(*error)  # type: ignore[arg-type]  # handed through as they came
