"""Transport `distributed-delta`: what changed since the last update, or everything, through the group of `distributed`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket
from torch import Tensor

from slime_models.transfer.changes import Encoding
from slime_models.transfer.meeting import BroadcastChannel
from slime_models.transfer.staging import StagedUpdate, StagingFolder
from slime_models.transfer.storage import UpdateStorage
from slime_models.transfer.transport import OnThread, Transport, UpdateOnThread
from slime_models.transfer.transports.broadcast import Broadcast, BroadcastReceiver, Part, receive_parts
from slime_models.transfer.transports.delta import Changes, LastSent


@dataclass(frozen=True, kw_only=True)
class BroadcastDeltaChannel:
    """Transport `distributed-delta`: a group that changes go through."""

    meeting: BroadcastChannel
    """Of the group."""
    base: str | None
    """`UpdateManifest.digest` of the weights that the receiver would apply changes to; None if it has none."""
    encoding: Encoding


class DeltaBroadcast:
    """One update, being sent: `Changes` through a group. A context manager."""

    def __init__(self, plan: TransferPlan, last: LastSent) -> None:
        self._channel: BroadcastDeltaChannel = plan.channel
        self._version, self._last = plan.version, last
        self._group = Broadcast(dataclasses.replace(plan, channel=self._channel.meeting))

    def __enter__(self) -> DeltaBroadcast:
        """Form the group with the receiver; see `Broadcast`."""
        self._group.__enter__()
        channel = self._channel
        self._changes = Changes(
            self._last, base=channel.base, encoding=channel.encoding, version=self._version
        )
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Announce a bucket's changes and broadcast them."""
        found = list(self._changes.encode(bucket, fingerprints))
        data = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for _, each in found if len(each)]
        self._group.send([entry for entry, _ in found], data, base=self._changes.base)
        return sum(each.nbytes for each in data)

    def end(self) -> None:
        """Say that there are no more buckets; these weights are now the base of the next update."""
        self._group.end()
        self._changes.end()

    def __exit__(self, *error: object) -> None:
        """Leave the group; a receiver that waits for more then fails."""
        self._group.__exit__(*error)


class DeltaBroadcastSender:
    """The sending half of `distributed-delta`, which remembers what it sent last."""

    def __init__(self, on_thread: OnThread) -> None:
        """Need no thread of the trainer's."""
        self.last = LastSent()

    def update(self, plan: TransferPlan) -> UpdateOnThread:
        """Return the update of a plan, not begun."""
        return UpdateOnThread(DeltaBroadcast(plan, self.last))


class DeltaBroadcastReceiver:
    """The receiving half of `distributed-delta`: applies changes to the copy in the staging folder, a bucket at a time."""

    def __init__(self, storage: UpdateStorage) -> None:
        self._storage, self._receiver = storage, BroadcastReceiver(storage)

    def open(self, version: str) -> BroadcastDeltaChannel:
        """Return where the group meets, and what changes would be applied to."""
        meeting = dataclasses.replace(self._receiver.open(version), memory=None)
        storage = self._storage
        return BroadcastDeltaChannel(meeting=meeting, base=storage.staging.digest, encoding=storage.encoding)

    async def arrive(self, plan: TransferPlan) -> StagedUpdate:
        """Wait for the sender, and apply what it sends."""
        staging = self._storage.staging

        def receive(channel: BroadcastChannel) -> StagedUpdate:
            return apply_parts(channel, staging, plan.version)

        return await self._receiver.join(plan.channel.meeting, plan.version, receive)

    def give_up(self, plan: TransferPlan) -> None:
        """Call the broadcast off."""
        self._receiver.call_off(plan.channel.meeting)


def apply_parts(channel: BroadcastChannel, staging: StagingFolder, version: str) -> StagedUpdate:
    """Receive an update, and apply it to what is staged; an error is raised when all of it has come, so that the sender has none.

    Raises:
        WeightSyncError: the sender left or hung, or a tensor is unknown, misshapen, missing or damaged.
        DeltaBaseError: the changes are to other weights than those that are staged.
    """
    has_begun, problem = False, None
    for part in receive_parts(channel, 1):
        received = _received(part)
        if problem is not None:
            continue
        try:
            if not has_begun:
                staging.begin_changes(part.base, version)
                has_begun = True
            for entry, data in zip(part.entries, received, strict=True):
                staging.take(entry, memoryview(data.numpy()))
        except WeightSyncError as error:
            problem = error
    if problem is not None:
        raise problem
    if not has_begun:
        staging.begin(version)
    return staging.seal()


def _received(part: Part) -> list[Tensor]:
    """Return the bytes of each entry, [n_bytes] uint8."""
    data = [torch.empty(entry.n_bytes, dtype=torch.uint8) for entry in part.entries]
    part.receive([each for each in data if each.numel()])
    return data


#: The entry point `distributed-delta` of `slime.transports`.
TRANSPORT = Transport(
    name="distributed-delta",
    create_sender=DeltaBroadcastSender,
    create_receiver=DeltaBroadcastReceiver,
)
