"""Transport `nccl`: buckets broadcast from the trainer to every rank of every server, which loads them as they come.

Between GPUs the weights go by NCCL, where either side computes on a CPU by gloo; announcements (names, shapes, dtypes, fingerprints) go
by gloo always. A bucket is one flat tensor. While a rank loads one, the next is on its way into another buffer. Nothing is staged: a
rank proves each bucket by fingerprints of what it then holds, and one that finds a mistake after it has written is not to
be used any more. A group stays for the next update, as NCCL takes seconds to form one; where a member says that it has another
one or none, or an update failed, the next one forms anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket
from torch import Tensor

from slime_models.transfer.manifest import Entry, aligned, bytes_of, entries_of, entry_of
from slime_models.transfer.meeting import (
    SENDER,
    BroadcastChannel,
    MeetingPlace,
    await_receivers,
    client_of,
    dist,
    form_group,
    hear,
    receiver_key,
    tell,
)
from slime_models.transfer.ranks_update import RanksUpdate
from slime_models.transfer.storage import UpdateStorage
from slime_models.transfer.threads import copy_all
from slime_models.transfer.transport import OnThread, ThreadSender, Transport
from slime_models.transfer.transports.broadcast import OTHERS_ERROR_S, group_errors, receiver_errors

#: Keys under which the sender says which group an update goes through, and which library carries its weights.
_GROUP, _BACKEND = "group", "backend"


class RankGroup:
    """One member's side of a group: announcements by gloo, weights by gloo or NCCL.

    Args:
        store: where it forms, by `client_of`; holds `_BACKEND`.
        rank: 0 for the sender.
        channel: of the update that it forms for.
        device: of this member's weights.

    Raises:
        StrangerError: a member does not know the secret.
    """

    def __init__(self, store: Any, rank: int, channel: BroadcastChannel, device: torch.device) -> None:
        self.key = channel.key
        """Which group it is."""
        self.told: Any = form_group(store, rank, channel)
        is_nccl = store.get(_BACKEND) == b"nccl"
        self._data: Any = _nccl_group(store, rank, channel) if is_nccl else self.told
        self.device = device if is_nccl else torch.device("cpu")
        """Of the tensors that are broadcast."""

    def broadcast(self, flat: Tensor) -> Any:
        """Begin to broadcast a tensor of `device` from rank 0; returns what is to be waited for."""
        return self._data.broadcast(flat, 0)


def group_of_sender(
    before: RankGroup | None, channel: BroadcastChannel, device: torch.device, *, version: str
) -> RankGroup:
    """Return the group of an update as its sender: the one before, where all ranks are still in it, or a new one.

    Raises:
        WeightSyncError: the receiving side called the update off, or two members share a GPU.
        DeadlineError: the ranks did not come in time.
        StrangerError: a member does not know the secret.
    """
    store = client_of(channel)
    store.set(SENDER, "1")
    there = [json.loads(text) for text in await_receivers(store, channel, version=version)]
    if before is not None and all(each["group"] == before.key for each in there):
        store.set(_GROUP, before.key)
        return before
    store.set(_BACKEND, _backend([_device_name(device), *(each["device"] for each in there)]))
    store.set(_GROUP, channel.key)
    return RankGroup(store, 0, channel, device)


def group_of_rank(
    before: RankGroup | None, channel: BroadcastChannel, rank: int, device: torch.device
) -> RankGroup:
    """Return the group of an update as a rank of a server; see `group_of_sender`.

    Raises:
        StrangerError: a member does not know the secret.
    """
    store, held = client_of(channel), None if before is None else before.key
    store.set(receiver_key(rank), json.dumps({"group": held, "device": _device_name(device)}))
    if before is not None and store.get(_GROUP).decode() == before.key:
        return before
    return RankGroup(store, rank, channel, device)


class RanksBroadcast:
    """One update, being sent. A context manager; `BlockingUpdate`.

    Args:
        plan: of the update.
        groups: the sender's, with at most one in it: that of the last update.
    """

    def __init__(self, plan: TransferPlan, groups: list[RankGroup]) -> None:
        self._channel: BroadcastChannel = plan.channel
        self._version, self._groups = plan.version, groups
        self._group: RankGroup | None = None
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
        with receiver_errors(self._version, wait_s=OTHERS_ERROR_S):
            group = self._joined(bucket[0][1].device)
            flat = self._flat_of(n_bytes, group.device)
            copy_all(
                [
                    (entry.spec.view(flat, entry.offset), tensor)
                    for entry, (_, tensor) in zip(entries, bucket, strict=True)
                    if entry.n_bytes
                ]
            )
            told = [asdict(entry) for entry in entries]
            tell(group.told, {"version": self._version, "n_bytes": n_bytes, "entries": told})
            group.broadcast(flat).wait()
        return bytes_of(bucket)

    def end(self) -> None:
        """Say that there are no more buckets."""
        with receiver_errors(self._version, wait_s=OTHERS_ERROR_S):
            tell(self._joined(torch.device("cpu")).told, {})

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Leave the update; after an error also the group, whose other members fail then."""
        self._flat, self._group = torch.empty(0, dtype=torch.uint8), None
        if kind is not None:
            self._groups.clear()

    def _joined(self, device: torch.device) -> RankGroup:
        """Return the group, which is formed with the first bucket, so that servers are paused no earlier."""
        if self._group is None:
            before = self._groups.pop() if self._groups else None
            self._group = group_of_sender(before, self._channel, device, version=self._version)
            self._groups.append(self._group)
        return self._group

    def _flat_of(self, n_bytes: int, device: torch.device) -> Tensor:
        if self._flat.numel() < n_bytes or self._flat.device != device:
            self._flat = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        return self._flat[:n_bytes]


@dataclass(frozen=True, kw_only=True)
class ReceivedBucket:
    """A bucket at a rank of a server."""

    version: str
    entries: Sequence[Entry]
    tensors: Mapping[str, Tensor]
    """By name, in the order of the entries; valid until the next bucket is asked for."""


class RankReceiver:
    """One rank of a server, for all of its updates.

    Args:
        device: of its weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: RankGroup | None = None
        self._flats = [torch.empty(0, dtype=torch.uint8)] * 2

    def buckets(self, channel: BroadcastChannel, rank: int) -> Iterator[ReceivedBucket]:
        """Join an update as a rank of its group, and yield its buckets; the next one arrives while the caller has one.

        Raises:
            WeightSyncError: the sender left or hung, or does not know the channel's secret. The group is left then.
        """
        try:
            with group_errors():
                self._group = group = group_of_rank(self._group, channel, rank, self._device)
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
                entries = [entry_of(values) for values in message["entries"]]
                tensors = {entry.name: entry.spec.view(flat, entry.offset) for entry in entries}
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

    def _flat_of(self, number: int, n_bytes: int, device: torch.device) -> Tensor:
        if self._flats[number].numel() < n_bytes:
            self._flats[number] = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        return self._flats[number][:n_bytes]


class RanksReceiver:
    """The receiving half of `nccl` in the process of the run: it says where the group meets, and receives nothing itself."""

    def __init__(self, storage: UpdateStorage) -> None:
        self._storage, self._place = storage, MeetingPlace(storage)

    def open(self, version: str) -> BroadcastChannel:
        """Return where sender and ranks meet."""
        count = self._storage.n_ranks
        if count is None:
            raise WeightSyncError(
                f"update to version {version}: transport nccl is for engines whose servers have ranks of their own; "
                "leave --update-weight-transport away"
            )
        return self._place.channel(n_receivers=count)

    async def arrive(self, plan: TransferPlan) -> RanksUpdate:
        """Wait until the sender has a bucket."""
        await self._place.sender_comes(plan.channel)
        return RanksUpdate(version=plan.version, channel=plan.channel, specs=self._storage.specs)

    def give_up(self, plan: TransferPlan) -> None:
        """Call the update off."""
        self._place.call_off(plan.channel)


def _placed(entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Return the entries with their places in a flat tensor, and its number of bytes."""
    placed, end = list[Entry](), 0
    for entry in entries:
        n_bytes = entry.spec.n_bytes
        placed.append(replace(entry, offset=end, n_bytes=n_bytes))
        end = aligned(end + n_bytes)
    return placed, end


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
