"""How an update comes to lie whole in a folder on the servers' host: a class for each transport; `INLETS` is the table."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from slime_core.daemon_thread import DaemonThread
from slime_core.errors import WeightSyncError
from slime_core.openmp import release_threads
from slime_core.protocols import TransferPlan
from slime_core.weights import Bucket, MemoryChannel
from slime_models.transfer.broadcast import call_off, open_store, receive_broadcast, sender_is_there
from slime_models.transfer.channels import BroadcastChannel, DeltaChannel, DiskChannel, Encoding
from slime_models.transfer.manifest import Spec, check_manifest, read_manifest

from slime_sglang.own_folder import OwnFolder
from slime_sglang.staging import WEIGHTS, Staging, Update

#: Seconds between two looks for a sender.
_POLL_S = 0.02
_HOST = "127.0.0.1"
#: Folders of earlier updates that are looked for when it is time to remove them.
_REMEMBERED = 8
#: Seconds that a sender which left a broadcast gets to say why, which cancels the receiving side.
_LAST_WORD_S = 2.0


@dataclass(kw_only=True)
class Place:
    """Where updates lie, and what they must be."""

    specs: Mapping[str, Spec]
    """Every tensor of the model, by Hugging Face name."""
    model_path: Path
    """Hugging Face folder of the servers."""
    staging_dir: Path
    """In shared memory."""
    disk_dir: Path
    """Shared with the sender."""
    keep_files: bool
    """Keep folders of earlier updates."""
    has_disk_dir: bool = False
    """Whether nobody else writes to `disk_dir`: what is there at first was left by a process that was killed."""
    encoding: Encoding
    """Of changes."""
    timeout_s: float
    """Deadline of a broadcast, seconds."""
    # One thread for all of it: torch keeps a pool of workers for each thread that calls it.
    _thread: DaemonThread = field(default_factory=lambda: DaemonThread("sglang-staging"))
    _folders: deque[Path] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @cached_property
    def staging(self) -> Staging:
        """The folder in shared memory, made when it is first needed."""
        return Staging(self._own_folder.path, specs=self.specs)

    @cached_property
    def _own_folder(self) -> OwnFolder:
        return OwnFolder(self.staging_dir, prefix="slime-weights-")

    @property
    def has_staging(self) -> bool:
        """Whether it was needed."""
        return "staging" in vars(self)

    def is_staged(self, update: Update) -> bool:
        """Whether an update lies in that folder, which the next one may write over."""
        return self.has_staging and update.folder == self.staging.folder

    def new_folder(self, version: str) -> Path:
        """Name a folder for an update; a second one to the same version gets another name."""
        if self.has_disk_dir and not self.keep_files and not self._folders:
            shutil.rmtree(self.disk_dir, ignore_errors=True)
        name = re.sub(r"[^\w.-]", "_", version)
        folder = self.disk_dir.absolute() / f"weight_v{name:0>6}-{secrets.token_hex(4)}"
        self._folders.append(folder)
        return folder

    def drop_folders(self, but: Path | None = None) -> None:
        """Remove the folders of updates except one, unless they are to be kept."""
        if not self.keep_files:
            for folder in self._folders:
                if folder != but:
                    shutil.rmtree(folder, ignore_errors=True)

    async def on_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Await a function that computes, or waits for a sender; after whatever an earlier update left undone there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def forget(self) -> None:
        """Take what is staged for no update."""
        if self.has_staging:
            self.staging.forget()

    def close(self) -> None:
        """Free memory and disk. May be called twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)  # a sender that hangs may keep it
        self.drop_folders()
        if self.has_staging:
            del self.staging
        if "_own_folder" in vars(self):
            self._own_folder.remove()
            del self._own_folder


class Inlet(Protocol):
    """The receiving half of a transport."""

    def __init__(self, place: Place) -> None:
        """Make nothing until it is needed."""

    def open(self, version: str) -> Any:
        """Return the channel for a plan."""

    async def arrive(self, plan: TransferPlan) -> Update:
        """Wait until the update lies whole on this host.

        Raises:
            WeightSyncError: a tensor is unknown, misshapen or missing, or the update is another; says which.
            DeltaBaseError: changes do not fit what is kept.
        """

    def give_up(self, plan: TransferPlan) -> None:
        """Tell a sender that waits, if one can, that the update will not be taken."""


class MemoryInlet:
    """Transport `memory`: buckets of this process are copied into shared memory."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def open(self, version: str) -> MemoryChannel:
        """Return a channel of this process."""
        return MemoryChannel()

    async def arrive(self, plan: TransferPlan) -> Update:
        """Copy bucket by bucket."""
        place, channel = self._place, plan.channel
        staging = place.staging

        def stage(bucket: Bucket) -> None:
            for name, tensor in bucket:
                staging.put(name, tensor, channel.fingerprints.get(name))

        await place.on_thread(staging.begin, plan.version)
        async for bucket in channel.buckets():
            await place.on_thread(stage, bucket)
        await place.on_thread(release_threads)
        return staging.seal()

    def give_up(self, plan: TransferPlan) -> None:
        """Do nothing: both sides are of one process, which cancels the other."""


class BroadcastInlet:
    """Transport `distributed`: this process receives a broadcast into shared memory, for all servers of this host."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def open(self, version: str) -> BroadcastChannel:
        """Return where the group meets."""
        return BroadcastChannel(
            host=_HOST,
            port=self._store.port,
            key=secrets.token_hex(8),
            secret=secrets.token_hex(32),
            n_receivers=1,
            timeout_s=self._place.timeout_s,
        )

    async def arrive(self, plan: TransferPlan) -> Update:
        """Wait for the sender, and take part in its broadcast."""
        while not sender_is_there(self._store, plan.channel):
            await asyncio.sleep(_POLL_S)
        staging = self._place.staging
        await self._place.on_thread(staging.forget)
        file = staging.folder / WEIGHTS
        receive = partial(receive_broadcast, plan.channel, 1, file, capacity=staging.n_bytes)
        try:
            manifest = await self._place.on_thread(receive)
        except WeightSyncError as error:
            await asyncio.sleep(_LAST_WORD_S)
            raise WeightSyncError(f"update to version {plan.version}: {error}") from error
        return staging.adopt(manifest, plan.version)

    def give_up(self, plan: TransferPlan) -> None:
        """Call it off."""
        call_off(self._store, plan.channel)

    @cached_property
    def _store(self) -> Any:
        return open_store(_HOST, self._place.timeout_s)


class DiskInlet:
    """Transport `disk`: the sender writes a Hugging Face folder, and the server reads it there."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def open(self, version: str) -> DiskChannel:
        """Return where to write."""
        return DiskChannel(
            folder=self._place.new_folder(version), config_from=self._place.model_path.absolute()
        )

    async def arrive(self, plan: TransferPlan) -> Update:
        """Wait for the folder."""
        place, folder = self._place, plan.channel.folder
        await _appears(folder)
        manifest = read_manifest(folder)
        check_manifest(manifest, place.specs, version=plan.version)
        return Update(folder=folder, manifest=manifest)

    def give_up(self, plan: TransferPlan) -> None:
        """Do nothing: the sender writes to its end and does not wait."""


class DeltaInlet:
    """Transport `disk-delta`: the sender writes changes, which are made to the copy in shared memory."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def open(self, version: str) -> DeltaChannel:
        """Return where to write, and what changes would be applied to."""
        place = self._place
        return DeltaChannel(
            folder=place.new_folder(version), base=place.staging.digest, encoding=place.encoding
        )

    async def arrive(self, plan: TransferPlan) -> Update:
        """Wait for the folder, and make the changes."""
        place, folder = self._place, plan.channel.folder
        await _appears(folder)
        update: Update = await place.on_thread(place.staging.apply, folder, plan.version)
        return update

    def give_up(self, plan: TransferPlan) -> None:
        """Do nothing: the sender writes to its end and does not wait."""


INLETS: Mapping[str, Callable[[Place], Inlet]] = {
    "memory": MemoryInlet,
    "distributed": BroadcastInlet,
    "disk-delta": DeltaInlet,
    "disk": DiskInlet,
}


async def _appears(folder: Path) -> None:
    while not folder.exists():
        await asyncio.sleep(_POLL_S)
