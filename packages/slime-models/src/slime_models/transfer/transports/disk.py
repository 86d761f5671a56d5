"""Transport `disk`: an update as a Hugging Face folder that appears whole, and is read where it was written."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket

from slime_models.hf.folder import WeightFiles, copy_other_files, new_folder
from slime_models.transfer.manifest import (
    Entry,
    UpdateManifest,
    bytes_of,
    check_manifest,
    entries_of,
    read_manifest,
)
from slime_models.transfer.staging import StagedUpdate
from slime_models.transfer.storage import UpdateStorage, appears
from slime_models.transfer.transport import ThreadSender, Transport


@dataclass(frozen=True, kw_only=True)
class DiskChannel:
    """Transport `disk`: a Hugging Face folder, which appears whole."""

    folder: Path
    """Folder to be made, on a file system that both sides see."""
    config_from: Path
    """Hugging Face folder whose other files (config, tokenizer) are copied beside the weights."""


class DiskWriter:
    """Writes a Hugging Face folder, one safetensors file for each bucket, and the update's manifest. A context manager."""

    def __init__(self, plan: TransferPlan) -> None:
        self._channel: DiskChannel = plan.channel
        self._version, self._entries = plan.version, list[Entry]()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> DiskWriter:
        """Make the folder under a temporary name."""
        self.folder = self._exit.enter_context(new_folder(self._channel.folder))
        self._files = WeightFiles(self.folder)
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Write a bucket."""
        self._files.write(dict(bucket))
        self._entries += entries_of(bucket, fingerprints)
        return bytes_of(bucket)

    def end(self) -> None:
        """Copy the other files, write the index and the manifest."""
        copy_other_files(self._channel.config_from, self.folder)
        self._files.finish()
        UpdateManifest(version=self._version, entries=self._entries).write(self.folder)

    def __exit__(self, *error: object) -> None:
        """Rename the finished folder to its final name, or remove it after an error."""
        self._exit.__exit__(*error)  # type: ignore[arg-type]  # handed through as they came


class DiskReceiver:
    """The receiving half of `disk`: waits for the folder, which is the staged update."""

    def __init__(self, storage: UpdateStorage) -> None:
        self._storage = storage

    def open(self, version: str) -> DiskChannel:
        """Return where to write."""
        return DiskChannel(
            folder=self._storage.new_folder(version), config_from=self._storage.model_path.absolute()
        )

    async def arrive(self, plan: TransferPlan) -> StagedUpdate:
        """Wait for the folder."""
        folder = plan.channel.folder
        await appears(folder)
        manifest = read_manifest(folder)
        check_manifest(manifest, self._storage.specs, version=plan.version)
        return StagedUpdate(folder=folder, manifest=manifest)

    def give_up(self, plan: TransferPlan) -> None:
        """Do nothing: the sender does not wait."""


#: The entry point `disk` of `slime.transports`.
TRANSPORT = Transport(
    name="disk",
    create_sender=partial(ThreadSender, DiskWriter),
    create_receiver=DiskReceiver,
    crosses_hosts=True,
)
