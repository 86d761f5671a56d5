"""Transport `distributed`: tensors broadcast over a gloo group of the sender and the receivers, or written to shared memory.

The process group (`meeting`) lives for one update. When a member's process ends, the other's call fails at once; a member that
hangs is noticed after the channel's `timeout_s`. Each bucket is announced (names, shapes, dtypes, fingerprints), then all of its tensors
follow at once, straight from the sender's memory to their places in the receiver's shared memory. A sender on the receiver's
machine writes them there itself, before it announces them, and the group carries the announcements alone. One that was given
up may still write the bucket that it has begun; fingerprints tell, as they are of what is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket
from torch import Tensor

from slime_models.transfer.manifest import Entry, UpdateManifest, bytes_of, entries_of, entry_of
from slime_models.transfer.meeting import (
    SENDER,
    BroadcastChannel,
    MeetingPlace,
    SenderLostError,
    await_receivers,
    broadcast_all,
    client_of,
    form_group,
    group_errors,
    hear,
    receiver_key,
    tell,
    view_of,
)
from slime_models.transfer.same_host import MemoryAddress, SharedWeights
from slime_models.transfer.staging import StagedUpdate
from slime_models.transfer.storage import UpdateStorage
from slime_models.transfer.threads import copy_all
from slime_models.transfer.transport import OnThread, ThreadSender, Transport

#: Seconds that one side of a broadcast waits with its error where the other failed: that one knows why, and its error ends both.
OTHERS_ERROR_S = 2.0


class MappedMemory:
    """The memory of a receiver on this machine, mapped for as long as updates go to it."""

    def __init__(self) -> None:
        self._last: SharedWeights | None = None

    def open(self, address: MemoryAddress | None) -> SharedWeights | None:
        """Return the memory at an address; None where there is none that this process sees."""
        self._last = None if address is None else address.opened(self._last)
        return self._last


class Broadcast:
    """One update, being sent: rank 0 of an update's process group. A context manager.

    Args:
        plan: of the update.
        mapped: the receiver's memory, which it keeps for the sender's next update.
    """

    def __init__(self, plan: TransferPlan, mapped: MappedMemory | None = None) -> None:
        self._channel: BroadcastChannel = plan.channel
        self._version = plan.version
        self._mapped = MappedMemory() if mapped is None else mapped
        self._memory: SharedWeights | None = None

    def __enter__(self) -> Broadcast:
        """Form the group with the receivers.

        Raises:
            WeightSyncError: the receiving side called the update off, or does not know the channel's secret.
            DeadlineError: they did not come in time.
        """
        channel = self._channel
        store = view_of(client_of(channel), channel)
        store.set(SENDER, "1")
        await_receivers(store, channel, version=self._version)
        try:
            self._group: Any = form_group(store, 0, channel)
        except RuntimeError as error:
            raise WeightSyncError(f"update to version {self._version}: no group formed: {error}") from error
        self._memory = self._mapped.open(channel.memory)
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Announce a bucket and broadcast its tensors, or write them to the receiver's memory and announce it."""
        entries = entries_of(bucket, fingerprints)
        if self._memory is not None:
            write_bucket(self._memory, bucket)
            self.send(entries, None)
        else:
            flat = (tensor.detach().to("cpu").contiguous().reshape(-1) for _, tensor in bucket)
            self.send(entries, (each.view(torch.uint8) for each in flat if each.numel()))
        return bytes_of(bucket)

    def send(
        self, entries: Sequence[Entry], data: Iterable[Tensor] | None, *, base: str | None = None
    ) -> None:
        """Announce tensors, and broadcast their bytes.

        Args:
            entries: of the tensors.
            data: bytes of each that has any, [n_bytes] uint8; None where they are in the receiver's memory already.
            base: digest of the weights that changes are to.

        Raises:
            WeightSyncError: a receiver left or hung.
        """
        told = {"version": self._version, "base": base, "is_there": data is None}
        assert self._group is not None, "put outside the context"
        with receiver_errors(self._version):
            tell(self._group, told | {"entries": [asdict(entry) for entry in entries]})
            broadcast_all(self._group, data or ())

    def end(self) -> None:
        """Say that there are no more buckets."""
        with receiver_errors(self._version):
            tell(self._group, {})

    def __exit__(self, *error: object) -> None:
        """Leave the group; receivers that wait for more then fail."""
        self._group = self._memory = None


def write_bucket(memory: SharedWeights, bucket: Bucket) -> None:
    """Copy the tensors that the receiver's model has to their places; of others it learns by the announcement."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, tensor in bucket:
        room = memory.room(name, tensor.nbytes)
        if room is not None and tensor.numel():
            pairs.append((room.view(tensor.dtype).view(tensor.shape), tensor))
    copy_all(pairs)


def receive_broadcast(
    channel: BroadcastChannel, rank: int, room: Callable[[str, int], Tensor | None]
) -> UpdateManifest:
    """Receive an update as rank `rank` of the group; returns its manifest, without offsets.

    Args:
        channel: that of the update's plan.
        rank: 1 for the first receiver.
        room: returns the memory for a tensor, by name and number of bytes, [n_bytes] uint8. Where it returns None, the
            tensor is in the manifest and its bytes are dropped: the sender's model is another then, which the caller finds by
            `check_manifest`.

    Raises:
        WeightSyncError: the sender left or hung, or does not know the channel's secret; then nothing of it was read.
    """
    entries: list[Entry] = []
    version = ""
    for part in receive_parts(channel, rank):
        version = part.version
        if not part.is_there:
            part.receive(_rooms(part.entries, room))
        entries += part.entries
    return UpdateManifest(version=version, entries=entries)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tensors that were announced to a receiver."""

    version: str
    """Of the update."""
    base: str | None
    """Digest of the weights that changes are to; None where there are none."""
    entries: Sequence[Entry]
    is_there: bool
    """Whether the sender has written them to the receiver's memory; if not, `receive` is to be called."""
    receive: Callable[[Iterable[Tensor]], None]
    """Receives the bytes of each tensor that has any, into memory of their size, [n_bytes] uint8."""


def receive_parts(channel: BroadcastChannel, rank: int) -> Iterator[Part]:
    """Join an update as rank `rank` of the group, and yield what is announced until its end.

    Raises:
        WeightSyncError: see `receive_broadcast`; also of `Part.receive`.
    """
    store = view_of(client_of(channel), channel)
    store.set(receiver_key(rank), "1")
    with group_errors():
        group = form_group(store, rank, channel)

    def receive(tensors: Iterable[Tensor]) -> None:
        with group_errors():
            broadcast_all(group, tensors)

    while True:
        with group_errors():
            message = hear(group)
        if not message:
            return
        entries = [entry_of(values) for values in message["entries"]]
        told = {name: message[name] for name in ("version", "base", "is_there")}
        yield Part(**told, entries=entries, receive=receive)


@contextmanager
def receiver_errors(version: str) -> Iterator[None]:
    """Raise what a group raises at the sender as a `WeightSyncError`."""
    try:
        yield
    except WeightSyncError:
        raise
    except RuntimeError as error:
        raise WeightSyncError(
            f"update to version {version}: a receiver left or hung during the broadcast: {error}"
        ) from error


def _rooms(entries: Iterable[Entry], room: Callable[[str, int], Tensor | None]) -> Iterator[Tensor]:
    """Yield the memory for each tensor that has any bytes."""
    for entry in entries:
        if n_bytes := entry.spec.n_bytes:
            place = room(entry.name, n_bytes)
            yield torch.empty(n_bytes, dtype=torch.uint8) if place is None else place


class BroadcastReceiver:
    """The receiving half of `distributed`: this process receives a broadcast into the staging folder, for all servers of this host."""

    def __init__(self, storage: UpdateStorage) -> None:
        self._storage, self._place = storage, MeetingPlace(storage)

    def open(self, version: str) -> BroadcastChannel:
        """Return where the process group meets."""
        return self._place.channel(n_receivers=1, memory=self._storage.staging.address)

    async def arrive(self, plan: TransferPlan) -> StagedUpdate:
        """Wait for the sender, and join its broadcast."""
        staging = self._storage.staging

        def receive(channel: BroadcastChannel) -> UpdateManifest:
            staging.forget()
            return receive_broadcast(channel, 1, staging.room)

        manifest = await self.join(plan.channel, plan.version, receive)
        return staging.adopt(manifest, plan.version)

    async def join[R](
        self, channel: BroadcastChannel, version: str, receive: Callable[[BroadcastChannel], R]
    ) -> R:
        """Wait for the sender, and return what a function that receives from it returns.

        Raises:
            WeightSyncError: the sender left or hung; names the update. What `receive` raises else.
        """
        await self._place.sender_comes(channel)
        try:
            received: R = await self._storage.on_thread(receive, channel)
        except SenderLostError as error:
            await asyncio.sleep(OTHERS_ERROR_S)
            raise WeightSyncError(f"update to version {version}: {error}") from error
        return received

    def give_up(self, plan: TransferPlan) -> None:
        """Call the broadcast off."""
        self.call_off(plan.channel)

    def call_off(self, channel: BroadcastChannel) -> None:
        """Tell the sender, if it waits for this receiver, that it will not come."""
        self._place.call_off(channel)


def _create_sender(on_thread: OnThread) -> ThreadSender:
    return ThreadSender(partial(Broadcast, mapped=MappedMemory()), on_thread)


#: The entry point `distributed` of `slime.transports`.
TRANSPORT = Transport(
    name="distributed",
    create_sender=_create_sender,
    create_receiver=BroadcastReceiver,
)
