"""Transport `nccl`: buckets broadcast from the trainer to every rank of every server, which loads them as they come.

Between GPUs the weights go by NCCL, where either side computes on a CPU by gloo; announcements (names, shapes, dtypes, fingerprints) go
by gloo always. A bucket is one flat tensor. While a rank loads one, the next is on its way into another buffer. Nothing is staged: a
rank proves each bucket by fingerprints of what it then holds, and one that finds a mistake after it has written is not to
be used any more. The groups live for as long as updates succeed: NCCL takes seconds to form one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket
from torch import Tensor

from slime_models.tensor_spec import Spec
from slime_models.transfer.broadcast import SENDER_ERROR_S, group_errors
from slime_models.transfer.manifest import Entry, aligned, bytes_of, entries_of
from slime_models.transfer.meeting import (
    BroadcastChannel,
    await_receivers,
    call_off,
    client_of,
    dist,
    form_group,
    hear,
    open_store,
    receiver_key,
    tell,
)
from slime_models.transfer.storage import UpdateStorage, pauses
from slime_models.transfer.threads import copy_all
from slime_models.transfer.transport import OnThread, ThreadSender, Transport

#: Key under which the sender says which library carries the weights.
_BACKEND = "backend"


@dataclass(frozen=True, kw_only=True)
class RanksChannel:
    """Transport `nccl`: the group of the sender and the ranks of all servers, and one update through it."""

    meeting: BroadcastChannel
    """Where the group meets, if it is not there from earlier updates."""
    update: str
    """Key that the sender sets when it begins this update."""

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


def read_channel(text: str) -> RanksChannel:
    """Return what `RanksChannel.text` wrote."""
    values = json.loads(text)
    return RanksChannel(meeting=BroadcastChannel(**values["meeting"]), update=values["update"])


class RanksUpdate:
    """An update that has begun, and that the ranks of the servers are to join.

    Args:
        version: of the update.
        channel: of its plan.
        specs: every tensor that it must have, by Hugging Face name.
    """

    def __init__(self, *, version: str, channel: RanksChannel, specs: Mapping[str, Spec]) -> None:
        self.version, self.channel, self.specs = version, channel, specs
        self.fingerprint: Fingerprint = {}
        """Fingerprints that the sender announced; known once a server has loaded it."""
        self._next_rank = 1

    def take_ranks(self, count: int) -> int:
        """Return the first of `count` ranks of the group in a row, which nobody else has."""
        first, self._next_rank = self._next_rank, self._next_rank + count
        return first


class RankGroup:
    """One member's side of the group: announcements by gloo, weights by gloo or NCCL.

    Args:
        channel: where it meets.
        rank: 0 for the sender.
        device: of this member's weights.
        version: of the update that it is formed for, for messages.

    Raises:
        WeightSyncError: the receiving side called the update off, or two members share a GPU.
        DeadlineError: the others did not come in time.
        StrangerError: a member does not know the secret.
    """

    def __init__(self, channel: BroadcastChannel, rank: int, device: torch.device, *, version: str) -> None:
        self.key = channel.key
        store, own = client_of(channel), _device_name(device)
        if rank == 0:
            names = [own, *await_receivers(store, channel, version=version)]
            store.set(_BACKEND, _backend(names))
        else:
            store.set(receiver_key(rank), own)
        self.told: Any = form_group(store, rank, channel)
        is_nccl = store.get(_BACKEND) == b"nccl"
        self._data: Any = _nccl_group(store, rank, channel) if is_nccl else self.told
        self.device = device if is_nccl else torch.device("cpu")
        """Of the tensors that are broadcast."""

    def broadcast(self, flat: Tensor) -> Any:
        """Begin to broadcast a tensor of `device` from rank 0; returns what is to be waited for."""
        return self._data.broadcast(flat, 0)


class RanksBroadcast:
    """One update, being sent. A context manager; `BlockingUpdate`.

    Args:
        plan: of the update.
        groups: the sender's, with at most one in it: that of the last update.
    """

    def __init__(self, plan: TransferPlan, groups: list[RankGroup]) -> None:
        self._channel: RanksChannel = plan.channel
        self._version, self._groups = plan.version, groups
        self._has_begun = False
        self._flat = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> RanksBroadcast:
        """Begin; the first bucket says so to the other side, so that servers are paused no earlier."""
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Announce a bucket and broadcast it as one tensor.

        Raises:
            WeightSyncError: a receiver left or hung, or the group does not form.
            DeadlineError: the receivers did not join in time.
        """
        if not bucket:
            return 0
        entries, n_bytes = _placed(entries_of(bucket, fingerprints))
        with self._naming():
            group = self._group(bucket[0][1].device)
            flat = self._flat_of(n_bytes, group.device)
            copy_all(
                [
                    (_view(flat, entry), tensor)
                    for entry, (_, tensor) in zip(entries, bucket, strict=True)
                    if entry.n_bytes
                ]
            )
            tell(
                group.told,
                {"version": self._version, "n_bytes": n_bytes, "entries": [asdict(entry) for entry in entries]},
            )
            group.broadcast(flat).wait()
        return bytes_of(bucket)

    def end(self) -> None:
        """Say that there are no more buckets."""
        with self._naming():
            tell(self._group(torch.device("cpu")).told, {})

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Leave the update; after an error also the group, whose other members fail then."""
        self._flat = torch.empty(0, dtype=torch.uint8)
        if kind is not None:
            self._groups.clear()

    def _group(self, device: torch.device) -> RankGroup:
        """Return the group of the update, which is formed where it is not there, and say at first that the update begins."""
        meeting = self._channel.meeting
        if not self._has_begun:
            client_of(meeting).set(self._channel.update, "1")
            self._has_begun = True
        if not self._groups or self._groups[0].key != meeting.key:
            self._groups.clear()
            self._groups.append(RankGroup(meeting, 0, device, version=self._version))
        return self._groups[0]

    def _flat_of(self, n_bytes: int, device: torch.device) -> Tensor:
        if self._flat.numel() < n_bytes or self._flat.device != device:
            self._flat = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        return self._flat[:n_bytes]

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Raise what the group raises as a `WeightSyncError`, once the receiving side had time to say why."""
        try:
            yield
        except WeightSyncError:
            raise
        except RuntimeError as error:
            time.sleep(SENDER_ERROR_S)
            raise WeightSyncError(
                f"update to version {self._version}: a rank of a server left or hung: {error}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class ReceivedBucket:
    """A bucket at a rank of a server."""

    version: str
    entries: Sequence[Entry]
    tensors: Mapping[str, Tensor]
    """By name, in the order of the entries; valid until the next bucket but one is asked for."""


class RankReceiver:
    """One rank of a server, for all of its updates.

    Args:
        device: of its weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: RankGroup | None = None
        self._flats = [torch.empty(0, dtype=torch.uint8)] * 2

    def buckets(self, channel: RanksChannel, rank: int) -> Iterator[ReceivedBucket]:
        """Join an update as a rank of its group, and yield its buckets; the next one arrives while the caller has one.

        Raises:
            WeightSyncError: the sender left or hung, or does not know the channel's secret. The group is left then.
        """
        try:
            with group_errors():
                group = self._joined(channel.meeting, rank)
            before: ReceivedBucket | None = None
            n_received = 0
            while message := self._heard(group):
                with group_errors():
                    flat = self._flat_of(n_received % 2, message["n_bytes"], group.device)
                    arriving = group.broadcast(flat)
                if before is not None:
                    yield before
                with group_errors():
                    arriving.wait()
                entries = [
                    Entry(**values | {"shape": tuple(values["shape"])}) for values in message["entries"]
                ]
                tensors = {entry.name: _view(flat, entry) for entry in entries}
                before = ReceivedBucket(version=message["version"], entries=entries, tensors=tensors)
                n_received += 1
            if before is not None:
                yield before
        except BaseException:
            self._group = None
            raise
        finally:
            self._flats = [torch.empty(0, dtype=torch.uint8)] * 2

    def _heard(self, group: RankGroup) -> Mapping[str, Any]:
        with group_errors():
            return hear(group.told)

    def _joined(self, meeting: BroadcastChannel, rank: int) -> RankGroup:
        if self._group is None or self._group.key != meeting.key:
            self._group = None
            self._group = RankGroup(meeting, rank, self._device, version="")
        return self._group

    def _flat_of(self, number: int, n_bytes: int, device: torch.device) -> Tensor:
        if self._flats[number].numel() < n_bytes:
            self._flats[number] = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        return self._flats[number][:n_bytes]


class RanksReceiver:
    """The receiving half of `nccl` in the process of the run: it says where the group meets, and receives nothing itself."""

    def __init__(self, storage: UpdateStorage) -> None:
        self._storage = storage
        self._meeting: BroadcastChannel | None = None

    def open(self, version: str) -> RanksChannel:
        """Return where the group meets; the same as before where the last update succeeded."""
        count = self._storage.n_ranks
        if count is None:
            raise WeightSyncError(
                f"update to version {version}: transport nccl is for engines whose servers have ranks of their own; "
                "leave --update-weight-transport away"
            )
        if self._meeting is None or self._meeting.n_receivers != count:
            self._meeting = BroadcastChannel(
                host=self._storage.host,
                port=self._store.port,
                key=secrets.token_hex(8),
                secret=secrets.token_hex(32),
                n_receivers=count,
                timeout_s=self._storage.timeout_s,
            )
        return RanksChannel(meeting=self._meeting, update=secrets.token_hex(8))

    async def arrive(self, plan: TransferPlan) -> RanksUpdate:
        """Wait until the sender begins."""
        channel: RanksChannel = plan.channel
        view, waits = dist.PrefixStore(channel.meeting.key, self._store), pauses()
        while not view.check([channel.update]):
            await asyncio.sleep(next(waits))
        return RanksUpdate(version=plan.version, channel=channel, specs=self._storage.specs)

    def give_up(self, plan: TransferPlan) -> None:
        """Call the update off, and have the next one meet anew."""
        call_off(self._store, plan.channel.meeting)
        self._meeting = None

    @cached_property
    def _store(self) -> Any:
        return open_store(self._storage.host, self._storage.timeout_s)


def _placed(entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Return the entries with their places in a flat tensor, and its number of bytes."""
    placed, end = list[Entry](), 0
    for entry in entries:
        n_bytes = Spec(shape=entry.shape, dtype=entry.dtype).n_bytes
        placed.append(replace(entry, offset=end, n_bytes=n_bytes))
        end = aligned(end + n_bytes)
    return placed, end


def _view(flat: Tensor, entry: Entry) -> Tensor:
    part = flat[entry.offset : entry.offset + entry.n_bytes]
    return part.view(getattr(torch, entry.dtype)).view(entry.shape)


def _device_name(device: torch.device) -> str:
    """Return what tells this device from those of other members: `cpu`, or the GPU's own number."""
    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"


def _backend(names: Sequence[str]) -> str:
    """Return the library that carries weights between members with such devices, that of the sender first.

    Raises:
        WeightSyncError: NCCL would have to carry them, and two members are on one GPU.
    """
    if any(name == "cpu" for name in names):
        return "gloo"
    if len(set(names)) < len(names):
        raise WeightSyncError(
            "transport nccl: two members of its group are on one GPU, which NCCL refuses; give servers GPUs of their own, "
            "or --update-weight-transport memory"
        )
    return "nccl"


def _nccl_group(store: Any, rank: int, channel: BroadcastChannel) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=channel.timeout_s)
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, channel.n_receivers + 1, options)


def _create_sender(on_thread: OnThread) -> ThreadSender:
    groups: list[RankGroup] = []
    return ThreadSender(lambda plan: RanksBroadcast(plan, groups), on_thread)


#: The entry point `nccl` of `slime.transports`.
TRANSPORT = Transport(
    name="nccl",
    create_sender=_create_sender,
    create_receiver=RanksReceiver,
    crosses_hosts=True,
    by_ranks=True,
)
