"""Transport `distributed`: tensors broadcast over a gloo group of the sender and the receivers, or written to shared memory.

The process group lives for one update. It forms through a TCP store, as a bare `ProcessGroupGloo`, so that it neither needs
nor touches torch's default group. When a member's process ends, the other's call fails at once; a member that hangs is
noticed after the channel's `timeout_s`. Each bucket is announced (names, shapes, dtypes, fingerprints), then all of its tensors
follow at once, straight from the sender's memory to their places in the receiver's shared memory. A sender on the receiver's
machine writes them there itself, before it announces them, and the group carries the announcements alone. One that was given
up may still write the bucket that it has begun; fingerprints tell, as they are of what is there.

The store listens on the channel's host only, and each member on the address by which its machine reaches that one. Whoever
reaches these addresses (any user of the machine, where they are loopback ones) can connect and read the store, so each member
proves to the others that it knows the channel's secret before anything is sent. What is sent is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed
from slime_core.errors import DeadlineError, WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket
from torch import Tensor

from slime_models.tensor_spec import Spec
from slime_models.transfer.manifest import Entry, UpdateManifest, bytes_of, entries_of
from slime_models.transfer.same_host import MemoryAddress, SharedWeights
from slime_models.transfer.staging import StagedUpdate
from slime_models.transfer.storage import UpdateStorage, pauses
from slime_models.transfer.threads import copy_all
from slime_models.transfer.transport import OnThread, ThreadSender, Transport

#: Its type stubs lack stores and bare groups.
dist: Any = torch.distributed
#: Seconds that a sender which failed in a broadcast gets to raise its error, which cancels the receiver.
_SENDER_ERROR_S = 2.0
_SENDER = "sender"
#: Bytes of each member's random challenge; also of the HMAC that answers all of them.
_PROOF_BYTES = 32
#: Key that the receiving side sets to cancel an update that has not begun.
_OFF = "off"


@dataclass(frozen=True, kw_only=True)
class BroadcastChannel:
    """Transport `distributed`: a process group of the sender, rank 0, and the receivers, made for one update."""

    host: str
    """IPv4 address of the receiver's machine."""
    port: int
    """Of the store where the group meets."""
    key: str
    """Prefix of this update's keys in the store."""
    secret: str = field(repr=False)
    """Of this update: each side proves to the others that it knows it, before anything is sent."""
    n_receivers: int
    timeout_s: float
    """Deadline of meeting, and of each broadcast."""
    memory: MemoryAddress | None = None
    """Memory of the only receiver; None where all bytes are to go through the group."""


def open_store(host: str, timeout_s: float) -> Any:
    """Open a store where groups meet, on a free port of `host`; it lives as long as the object."""
    listener = socket.socket()
    listener.bind((host, 0))  # by itself a store listens on all addresses
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def own_address(channel: BroadcastChannel) -> str:
    """Return the address of this machine by which it reaches the channel's host."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((channel.host, channel.port))  # looks for a way, and sends nothing
        address: str = probe.getsockname()[0]
    return address


def sender_is_there(store: Any, channel: BroadcastChannel) -> bool:
    """Return whether the sender waits for the receivers."""
    return bool(dist.PrefixStore(channel.key, store).check([_SENDER]))


def call_off(store: Any, channel: BroadcastChannel) -> None:
    """Tell a sender that waits for receivers that none will come."""
    dist.PrefixStore(channel.key, store).set(_OFF, "1")


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
        store = _client(channel)
        store.set(_SENDER, "1")
        wanted = [_receiver(rank) for rank in range(1, channel.n_receivers + 1)]
        deadline = time.monotonic() + channel.timeout_s
        waits = pauses()
        while not store.check(wanted):
            if store.check([_OFF]):
                raise WeightSyncError(
                    f"update to version {self._version}: the receiving side called it off before it began"
                )
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"update to version {self._version}: the receivers had not joined after {channel.timeout_s:g} s"
                )
            time.sleep(next(waits))
        try:
            self._group: Any = _group(store, 0, channel)
        except RuntimeError as error:
            raise WeightSyncError(f"update to version {self._version}: no group formed: {error}") from error
        self._memory = self._mapped.open(channel.memory)
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Announce a bucket and broadcast its tensors, or write them to the receiver's memory and announce it."""
        is_there = self._memory is not None
        if self._memory is not None:
            write_bucket(self._memory, bucket)
        entries = [asdict(entry) for entry in entries_of(bucket, fingerprints)]
        self._announce({"version": self._version, "entries": entries, "is_there": is_there})
        if is_there:
            return bytes_of(bucket)
        self._broadcast(
            tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            for _, tensor in bucket
            if tensor.numel()
        )
        return bytes_of(bucket)

    def end(self) -> None:
        """Say that there are no more buckets."""
        self._announce({})

    def __exit__(self, *error: object) -> None:
        """Leave the group; receivers that wait for more then fail."""
        self._group = self._memory = None

    def _announce(self, message: Mapping[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        self._broadcast([torch.tensor([len(text)]), text])

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        assert self._group is not None, "put outside the context"
        try:
            _broadcast(self._group, tensors)
        except RuntimeError as error:
            raise WeightSyncError(
                f"update to version {self._version}: a receiver left or hung during the broadcast: {error}"
            ) from error


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
    store = _client(channel)
    store.set(_receiver(rank), "1")
    try:
        group = _group(store, rank, channel)
        entries: list[Entry] = []
        version = ""
        while message := _message(group):
            version = message["version"]
            new = [Entry(**values | {"shape": tuple(values["shape"])}) for values in message["entries"]]
            if not message["is_there"]:
                _broadcast(group, _rooms(new, room))
            entries += new
    except _StrangerError as error:
        raise WeightSyncError(str(error)) from error
    except RuntimeError as error:
        raise WeightSyncError(f"the sender left or hung during the broadcast: {error}") from error
    return UpdateManifest(version=version, entries=entries)


def _message(group: Any) -> Mapping[str, Any]:
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(group, [length])
    text = torch.zeros(int(length), dtype=torch.uint8)
    _broadcast(group, [text])
    message: Mapping[str, Any] = json.loads(text.numpy().tobytes())
    return message


def _rooms(entries: Iterable[Entry], room: Callable[[str, int], Tensor | None]) -> Iterator[Tensor]:
    """Yield the memory for each tensor that has any bytes."""
    for entry in entries:
        if n_bytes := Spec(shape=entry.shape, dtype=entry.dtype).n_bytes:
            place = room(entry.name, n_bytes)
            yield torch.empty(n_bytes, dtype=torch.uint8) if place is None else place


def _broadcast(group: Any, tensors: Iterable[Tensor]) -> None:
    """Broadcast tensors from rank 0, all of them in flight at once. Collective over the group."""
    for work in [group.broadcast(tensor, 0) for tensor in tensors]:
        work.wait()


def _client(channel: BroadcastChannel) -> Any:
    store = dist.TCPStore(
        channel.host,
        channel.port,
        is_master=False,
        timeout=timedelta(seconds=channel.timeout_s),
        wait_for_workers=False,
    )
    return dist.PrefixStore(channel.key, store)


def _group(store: Any, rank: int, channel: BroadcastChannel) -> Any:
    """Form the group.

    Raises:
        _StrangerError: a member does not know the secret.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=channel.timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(channel))]
    size = channel.n_receivers + 1
    group = dist.ProcessGroupGloo(store, rank, size, options)
    draws = [_told(group, each, secrets.token_bytes(_PROOF_BYTES)) for each in range(size)]
    proofs = [  # each by its rank, as none is to repeat another's
        hmac.digest(channel.secret.encode(), bytes([each]) + b"".join(draws), "sha256")
        for each in range(size)
    ]
    told = [_told(group, each, proofs[rank]) for each in range(size)]  # all, so that nobody is left waiting
    if not hmac.compare_digest(b"".join(told), b"".join(proofs)):
        raise _StrangerError("a member of the group does not know its secret, and is none of this run")
    return group


def _told(group: Any, root: int, own: bytes) -> bytes:
    """Broadcast `own` from the rank `root`; returns what that rank sent. Collective over the group."""
    said = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    group.broadcast(said, root).wait()
    return said.numpy().tobytes()


class _StrangerError(RuntimeError):
    """A member of the group does not know the channel's secret."""


def _receiver(rank: int) -> str:
    return f"receiver-{rank}"


class BroadcastReceiver:
    """The receiving half of `distributed`: this process receives a broadcast into the staging folder, for all servers of this host."""

    def __init__(self, storage: UpdateStorage) -> None:
        self._storage = storage

    def open(self, version: str) -> BroadcastChannel:
        """Return where the process group meets."""
        return BroadcastChannel(
            host=self._storage.host,
            port=self._store.port,
            key=secrets.token_hex(8),
            secret=secrets.token_hex(32),
            n_receivers=1,
            timeout_s=self._storage.timeout_s,
            memory=self._storage.staging.address,
        )

    async def arrive(self, plan: TransferPlan) -> StagedUpdate:
        """Wait for the sender, and join its broadcast."""
        waits = pauses()
        while not sender_is_there(self._store, plan.channel):
            await asyncio.sleep(next(waits))
        staging = self._storage.staging
        await self._storage.on_thread(staging.forget)
        try:
            manifest = await self._storage.on_thread(receive_broadcast, plan.channel, 1, staging.room)
        except WeightSyncError as error:
            await asyncio.sleep(_SENDER_ERROR_S)
            raise WeightSyncError(f"update to version {plan.version}: {error}") from error
        return staging.adopt(manifest, plan.version)

    def give_up(self, plan: TransferPlan) -> None:
        """Call the broadcast off."""
        call_off(self._store, plan.channel)

    @cached_property
    def _store(self) -> Any:
        return open_store(self._storage.host, self._storage.timeout_s)


def _create_sender(on_thread: OnThread) -> ThreadSender:
    return ThreadSender(partial(Broadcast, mapped=MappedMemory()), on_thread)


#: The entry point `distributed` of `slime.transports`.
TRANSPORT = Transport(
    name="distributed",
    create_sender=_create_sender,
    create_receiver=BroadcastReceiver,
)
