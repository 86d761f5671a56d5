"""The process groups of `distributed`, `nccl` and `cuda-ipc`: where sender and receivers meet, and how each proves who it is.

It is a bare `ProcessGroupGloo` that forms through a TCP store, so that it neither needs nor touches torch's default group. The
store listens on the channel's host only, and each member on the address by which its machine reaches that one. Whoever reaches
these addresses (any user of the machine, where they are loopback ones) can connect and read the store, so each member proves to
the others that it knows the channel's secret before anything is sent. What is sent is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed
from slime_core.errors import DeadlineError, WeightSyncError
from slime_core.runtime.processes.ports import address_towards
from torch import Tensor

from slime_models.transfer.same_host import MemoryAddress
from slime_models.transfer.storage import UpdateStorage, pauses

#: Its type stubs lack stores and bare groups.
dist: Any = torch.distributed
#: Key that the sender sets when it waits for the receivers.
SENDER = "sender"
#: Key that the receiving side sets to how many ranks of servers are to join, once it knows (`nccl`, `cuda-ipc`).
EXPECTED = "expected"
#: Key that the receiving side sets to call an update off.
OFF = "off"
#: Seconds that a connection may take at least: torch asks for the names of both addresses, and a name server that does not answer
#: takes 5 to 10 s for each.
_CONNECTING_S = 60.0
#: Bytes of each member's random challenge; also of the HMAC that answers all of them.
_PROOF_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class BroadcastChannel:
    """Where a process group of the sender, rank 0, and the receivers meets."""

    host: str
    """IPv4 address of the receiver's machine."""
    port: int
    """Of the store where the group meets."""
    key: str
    """Prefix of this group's keys in the store."""
    secret: str = field(repr=False)
    """Of this group: each side proves to the others that it knows it, before anything is sent."""
    n_receivers: int
    """0 in the plan of an update whose ranks are counted when it begins."""
    timeout_s: float
    """Deadline of meeting, and of each broadcast."""
    memory: MemoryAddress | None = None
    """Memory of the only receiver; None where all bytes are to go through the group."""


def channel_text(channel: BroadcastChannel) -> str:
    """Return a channel, of whose members none has the receiver's memory, as JSON."""
    return json.dumps({**vars(channel), "memory": None})


def read_channel(text: str) -> BroadcastChannel:
    """Return what `channel_text` wrote."""
    return BroadcastChannel(**json.loads(text))


class MeetingPlace:
    """Where the receiving side of updates has members of groups meet: a store at its address, opened on first use.

    Args:
        storage: says at which address, and how long members wait for one another.
    """

    def __init__(self, storage: UpdateStorage) -> None:
        self._storage = storage

    def channel(self, *, n_receivers: int, memory: MemoryAddress | None = None) -> BroadcastChannel:
        """Return a new channel, whose key and secret nobody else has."""
        return BroadcastChannel(
            host=self._storage.host,
            port=self._store.port,
            key=secrets.token_hex(8),
            secret=secrets.token_hex(32),
            n_receivers=n_receivers,
            timeout_s=self._storage.timeout_s,
            memory=memory,
        )

    async def sender_comes(self, channel: BroadcastChannel) -> None:
        """Wait until the sender of a channel is there."""
        view, waits = dist.PrefixStore(channel.key, self._store), pauses()
        while not view.check([SENDER]):
            await asyncio.sleep(next(waits))

    def expect(self, channel: BroadcastChannel) -> None:
        """Tell the sender how many ranks of servers join, which it waits for."""
        dist.PrefixStore(channel.key, self._store).set(EXPECTED, str(channel.n_receivers))

    def call_off(self, channel: BroadcastChannel) -> None:
        """Tell members that wait for others that these will not come."""
        call_off(self._store, channel)

    @cached_property
    def _store(self) -> Any:
        return open_store(self._storage.host, self._storage.timeout_s)


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


def call_off(store: Any, channel: BroadcastChannel) -> None:
    """Tell members that wait for others that these will not come."""
    dist.PrefixStore(channel.key, store).set(OFF, "1")


def await_receivers(store: Any, channel: BroadcastChannel, *, version: str) -> list[str]:
    """Wait, as the sender, until all receivers are there; returns what each set its key to.

    Args:
        store: the channel's, by `view_of`.
        channel: where they meet.
        version: of the update, for messages.

    Raises:
        WeightSyncError: the receiving side called the update off.
        DeadlineError: they did not come in time.
    """
    keys = [receiver_key(rank) for rank in range(1, channel.n_receivers + 1)]
    where = f"update to version {version}"
    try:
        return await_keys(store, keys, timeout_s=channel.timeout_s)
    except CalledOffError as error:
        raise WeightSyncError(f"{where}: {error} before it began") from error
    except AbsentError as error:
        raise DeadlineError(f"{where}: the receivers had not joined after {channel.timeout_s:g} s") from error


def await_keys(store: Any, keys: Sequence[str], *, timeout_s: float) -> list[str]:
    """Wait until keys of a group are set; returns their values.

    Raises:
        CalledOffError: the receiving side called the update off.
        AbsentError: they were not set in time.
    """
    deadline, waits = time.monotonic() + timeout_s, pauses()
    while not store.check(list(keys)):
        if store.check([OFF]):
            raise CalledOffError("the receiving side called it off")
        if time.monotonic() > deadline:
            raise AbsentError(f"{', '.join(keys)}: not there after {timeout_s:g} s")
        time.sleep(next(waits))
    return [store.get(key).decode() for key in keys]


def broadcast_all(group: Any, tensors: Iterable[Tensor]) -> None:
    """Broadcast tensors from rank 0, all of them in flight at once. Collective over the group."""
    for work in [group.broadcast(tensor, 0) for tensor in tensors]:
        work.wait()


def tell(group: Any, message: Mapping[str, Any]) -> None:
    """Send a message from rank 0, where the others call `hear`."""
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    broadcast_all(group, [torch.tensor([len(text)]), text])


def hear(group: Any) -> Mapping[str, Any]:
    """Return the message that rank 0 sends next by `tell`."""
    length = torch.zeros(1, dtype=torch.int64)
    broadcast_all(group, [length])
    text = torch.zeros(int(length), dtype=torch.uint8)
    broadcast_all(group, [text])
    message: Mapping[str, Any] = json.loads(text.numpy().tobytes())
    return message


def client_of(channel: BroadcastChannel) -> Any:
    """Return a new connection to the store where the group meets; see `view_of`."""
    seconds = max(channel.timeout_s, _CONNECTING_S)
    store = dist.TCPStore(
        channel.host,
        channel.port,
        is_master=False,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )
    store.set_timeout(timedelta(seconds=channel.timeout_s))
    return store


def view_of(client: Any, channel: BroadcastChannel) -> Any:
    """Return what a member sees of the store: the keys of its group alone."""
    return dist.PrefixStore(channel.key, client)


def form_group(store: Any, rank: int, channel: BroadcastChannel) -> Any:
    """Form the group.

    Raises:
        StrangerError: a member does not know the secret.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=channel.timeout_s)
    options._devices = [
        dist.ProcessGroupGloo.create_device(hostname=address_towards(f"{channel.host}:{channel.port}"))
    ]
    size = channel.n_receivers + 1
    group = dist.ProcessGroupGloo(store, rank, size, options)
    draws = [_told(group, each, secrets.token_bytes(_PROOF_BYTES)) for each in range(size)]
    proofs = [proof_of(channel.secret, each, draws) for each in range(size)]
    told = [_told(group, each, proofs[rank]) for each in range(size)]  # all, so that nobody is left waiting
    if not hmac.compare_digest(b"".join(told), b"".join(proofs)):
        raise StrangerError("a member of the group does not know its secret, and is none of this run")
    return group


def proof_of(secret: str, rank: int, draws: Sequence[bytes]) -> bytes:
    """Return what the member `rank` says to prove that it knows a secret: another for each, as none is to repeat another's."""
    return hmac.digest(secret.encode(), rank.to_bytes(4, "big") + b"".join(draws), "sha256")


def _told(group: Any, root: int, own: bytes) -> bytes:
    """Broadcast `own` from the rank `root`; returns what that rank sent. Collective over the group."""
    said = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    group.broadcast(said, root).wait()
    return said.numpy().tobytes()


class CalledOffError(RuntimeError):
    """The receiving side has called an update off."""


class AbsentError(RuntimeError):
    """A member did not come in time."""


class StrangerError(RuntimeError):
    """A member of the group does not know the channel's secret."""


def receiver_key(rank: int) -> str:
    """Return the key that a receiver sets when it is there."""
    return f"receiver-{rank}"


@contextmanager
def group_errors() -> Iterator[None]:
    """Raise what a group raises at a receiver as a `SenderLostError`."""
    try:
        yield
    except StrangerError as error:
        raise SenderLostError(str(error)) from error
    except RuntimeError as error:
        raise SenderLostError(f"the sender left or hung during the broadcast: {error}") from error


class SenderLostError(WeightSyncError):
    """The sender of an update left or hung, or is none of this run."""
