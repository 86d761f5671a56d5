"""Transport `distributed`: tensors broadcast over a gloo group of the sender and the receivers.

The group is made for one update and forms through a store, as a bare `ProcessGroupGloo`: it needs no default group, and
touches none. Where one end goes, the other's call fails at once; one that hangs is noticed after the channel's
`timeout_s`. Each bucket is announced (names, shapes, dtypes, fingerprints), then its tensors follow, straight from the
sender's memory into the receiver's file.

Store and group listen on the channel's host alone. There any user can reach them, and read what is in the store: so each
member proves to the others that it knows the channel's secret before anything is sent.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from slime_core.errors import DeadlineError, WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights import Bucket
from torch import Tensor

from slime_models.transfer.channels import BroadcastChannel
from slime_models.transfer.manifest import Entry, Manifest, aligned, bytes_of, entries_of

#: Its type stubs lack stores and bare groups.
dist: Any = torch.distributed
_POLL_S = 0.02
_SENDER = "sender"
#: Bytes of what each member draws for the proof, and of the proof.
_PROOF_BYTES = 32
#: Key by which the receiving side calls an update off that has not begun.
_OFF = "off"


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


def sender_is_there(store: Any, channel: BroadcastChannel) -> bool:
    """Return whether the sender waits for the receivers."""
    return bool(dist.PrefixStore(channel.key, store).check([_SENDER]))


def call_off(store: Any, channel: BroadcastChannel) -> None:
    """Tell a sender that waits that nobody will come."""
    dist.PrefixStore(channel.key, store).set(_OFF, "1")


class BroadcastSender:
    """Rank 0 of an update's group. A context."""

    def __init__(self, plan: TransferPlan) -> None:
        self._channel: BroadcastChannel = plan.channel
        self._version = plan.version

    def __enter__(self) -> BroadcastSender:
        """Meet the receivers.

        Raises:
            WeightSyncError: the receiving side called the update off, or does not know the channel's secret.
            DeadlineError: they did not come in time.
        """
        channel = self._channel
        store = _client(channel)
        store.set(_SENDER, "1")
        wanted = [_receiver(rank) for rank in range(1, channel.n_receivers + 1)]
        deadline = time.monotonic() + channel.timeout_s
        while not store.check(wanted):
            if store.check([_OFF]):
                raise WeightSyncError(
                    f"update to version {self._version}: the receiving side called it off before it began"
                )
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"update to version {self._version}: the receivers had not joined after {channel.timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        try:
            self._group: Any = _group(store, 0, channel)
        except RuntimeError as error:
            raise WeightSyncError(f"update to version {self._version}: no group formed: {error}") from error
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Announce a bucket and broadcast its tensors."""
        entries = entries_of(bucket, fingerprints)
        self._announce({"version": self._version, "entries": [asdict(entry) for entry in entries]})
        for _, tensor in bucket:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            if flat.numel():
                self._broadcast(flat)
        return bytes_of(bucket)

    def end(self) -> None:
        """Say that there are no more buckets."""
        self._announce({})

    def __exit__(self, *error: object) -> None:
        """Leave the group; receivers that wait for more then fail."""
        self._group = None

    def _announce(self, message: Mapping[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(text)]))
        self._broadcast(text)

    def _broadcast(self, tensor: Tensor) -> None:
        assert self._group is not None, "put outside the context"
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise WeightSyncError(
                f"update to version {self._version}: a receiver left or hung during the broadcast: {error}"
            ) from error


def receive_broadcast(channel: BroadcastChannel, rank: int, file: Path, *, capacity: int) -> Manifest:
    """Take an update into a file, as rank `rank` of the group; returns what was announced, with each tensor's place.

    Args:
        channel: of the update's plan.
        rank: 1 for the first receiver.
        file: made, or written over.
        capacity: bytes of the file. A tensor beyond them is announced in the manifest and its bytes are dropped: then
            the model is another, which is for the caller to name.

    Raises:
        WeightSyncError: the sender left or hung, or does not know the channel's secret; then nothing of it was read.
    """
    store = _client(channel)
    store.set(_receiver(rank), "1")
    try:
        group = _group(store, rank, channel)
        memory = torch.from_file(str(file), shared=True, size=capacity, dtype=torch.uint8)
        entries: list[Entry] = []
        version, end = "", 0
        while message := _message(group):
            version = message["version"]
            for values in message["entries"]:
                n_bytes = _n_bytes(values)
                fits = end + n_bytes <= capacity
                target = memory[end : end + n_bytes] if fits else torch.empty(n_bytes, dtype=torch.uint8)
                if n_bytes:
                    group.broadcast(target, 0).wait()
                entry = Entry(**values | {"shape": tuple(values["shape"])})
                entries.append(replace(entry, offset=end, n_bytes=n_bytes))
                end = aligned(end + n_bytes)
    except _StrangerError as error:
        raise WeightSyncError(str(error)) from error
    except RuntimeError as error:
        raise WeightSyncError(f"the sender left or hung during the broadcast: {error}") from error
    return Manifest(version=version, entries=entries)


def _message(group: Any) -> Mapping[str, Any]:
    length = torch.zeros(1, dtype=torch.int64)
    group.broadcast(length, 0).wait()
    text = torch.zeros(int(length), dtype=torch.uint8)
    group.broadcast(text, 0).wait()
    message: Mapping[str, Any] = json.loads(text.numpy().tobytes())
    return message


def _n_bytes(values: Mapping[str, Any]) -> int:
    return torch.Size(values["shape"]).numel() * int(getattr(torch, values["dtype"]).itemsize)


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
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=channel.host)]
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
    """Return what the rank `root` of a group says: `own` there."""
    said = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    group.broadcast(said, root).wait()
    return said.numpy().tobytes()


class _StrangerError(RuntimeError):
    """Somebody else is in the group."""


def _receiver(rank: int) -> str:
    return f"receiver-{rank}"
