"""Transport `memory`: tensors handed over inside one process, by core's `MemoryChannel`."""

from __future__ import annotations

from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket, MemoryChannel

from slime_models.transfer.manifest import bytes_of
from slime_models.transfer.staging import StagedUpdate
from slime_models.transfer.storage import UpdateStorage
from slime_models.transfer.transport import OnThread, Transport


class MemoryUpdate:
    """Hands the buckets of an update to a receiver in this process. An asynchronous context manager."""

    def __init__(self, plan: TransferPlan) -> None:
        self._channel: MemoryChannel = plan.channel

    async def __aenter__(self) -> MemoryUpdate:
        """Begin; there is nothing to prepare."""
        return self

    async def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Hand a bucket over; returns the number of bytes once the receiver has copied them."""
        await self._channel.put(bucket, fingerprints)
        return bytes_of(bucket)

    async def end(self) -> None:
        """Say that there are no more buckets."""
        await self._channel.end()

    async def __aexit__(self, *error: object) -> None:
        """Leave; there is nothing to undo."""


class MemorySender:
    """The sending half of `memory`, which blocks nowhere."""

    def __init__(self, on_thread: OnThread) -> None:
        """Need no thread."""

    def update(self, plan: TransferPlan) -> MemoryUpdate:
        """Return the update of a plan."""
        return MemoryUpdate(plan)


class MemoryReceiver:
    """The receiving half of `memory`: buckets are copied into the staging folder."""

    def __init__(self, storage: UpdateStorage) -> None:
        self._storage = storage

    def open(self, version: str) -> MemoryChannel:
        """Return a channel of this process."""
        return MemoryChannel()

    async def arrive(self, plan: TransferPlan) -> StagedUpdate:
        """Copy the tensors bucket by bucket."""
        storage, channel = self._storage, plan.channel
        staging = storage.staging

        await storage.on_thread(staging.begin, plan.version)
        async for bucket in channel.buckets():
            await storage.on_thread(staging.put, bucket, channel.fingerprints)
        return staging.seal()

    def give_up(self, plan: TransferPlan) -> None:
        """Do nothing: both sides are of one process, which cancels the other."""


#: The entry point `memory` of `slime.transports`.
TRANSPORT = Transport(name="memory", create_sender=MemorySender, create_receiver=MemoryReceiver)
