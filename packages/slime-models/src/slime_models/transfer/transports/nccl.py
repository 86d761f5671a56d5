"""Transport `nccl`: buckets broadcast from the trainer to every rank of every server, which loads them as they come.

Between GPUs the weights go by NCCL, where either side computes on a CPU by gloo; announcements (names, shapes, dtypes, fingerprints) go
by gloo always. A bucket is one flat tensor. While a rank loads one, the next is on its way into another buffer. Nothing is staged: a
rank proves each bucket by fingerprints of what it then holds, and one that finds a mistake after it has written is not to
be used any more. A group stays for the next update, as NCCL takes seconds to form one; where a member says that it has another
one or none, or an update failed, the next one forms anew.

The ranks are counted when the sender is there. Where one is lost, the group breaks, and all members leave it: by their connections to the
one that is gone and to those that have left, or because the receiving side calls the update off. The ranks say so. The sender
goes on without them, so that all ranks of a trainer come to the end of its buckets: what became of the update, the receiving side says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket
from torch import Tensor

from slime_models.transfer.manifest import Entry, aligned, bytes_of, entries_of, entry_of
from slime_models.transfer.meeting import (
    BroadcastChannel,
    MeetingPlace,
    StrangerError,
    hear,
    tell,
)
from slime_models.transfer.rank_group import RankGroup, forget_frames, group_of_rank, group_of_sender
from slime_models.transfer.ranks_update import RanksUpdate
from slime_models.transfer.storage import UpdateStorage
from slime_models.transfer.threads import copy_all
from slime_models.transfer.transport import OnThread, ThreadSender, Transport
from slime_models.transfer.transports.broadcast import group_errors

#: Share of a call's deadline after which a member of a group gives the others up: ranks that wait for one that hangs are to answer
#: their server's call before its deadline, which the one that hangs misses.
_PATIENCE = 0.5
logger = logging.getLogger(__name__)


class RanksBroadcast:
    """One update, being sent. A context manager; `BlockingUpdate`. Where a receiver is lost, the rest is taken and not sent.

    Args:
        plan: of the update.
        groups: the sender's, with at most one in it: that of the last update.
    """

    def __init__(self, plan: TransferPlan, groups: list[RankGroup]) -> None:
        self._channel: BroadcastChannel = plan.channel
        self._version, self._groups = plan.version, groups
        self._group: RankGroup | None = None
        self._is_broken = False
        self._flat = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> RanksBroadcast:
        """Begin; the first bucket says so to the other side, so that servers are paused no earlier."""
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Announce a bucket and broadcast it as one tensor; returns 0 where a receiver is lost.

        Raises:
            WeightSyncError: a member does not know the secret, or two of them share a GPU.
        """
        group = self._joined(bucket[0][1].device) if bucket else None
        if group is None:
            return 0
        entries, n_bytes = _placed(entries_of(bucket, fingerprints))
        flat = self._flat_of(n_bytes, group.device)
        copy_all(
            [
                (entry.spec.view(flat, entry.offset), tensor)
                for entry, (_, tensor) in zip(entries, bucket, strict=True)
                if entry.n_bytes
            ]
        )
        told = [asdict(entry) for entry in entries]
        with self._breaking():
            tell(group.told, {"version": self._version, "n_bytes": n_bytes, "entries": told})
            group.wait(group.broadcast(flat))
        return 0 if self._is_broken else bytes_of(bucket)

    def end(self) -> None:
        """Say that there are no more buckets."""
        group = self._joined(torch.device("cpu"))
        if group is not None:
            with self._breaking():
                tell(group.told, {})

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Leave the update; after an error also the group, whose other members fail then."""
        self._flat, self._group = torch.empty(0, dtype=torch.uint8), None
        if kind is not None:
            self._leave()

    def _joined(self, device: torch.device) -> RankGroup | None:
        """Return the group, which is formed with the first bucket, so that servers are paused no earlier; None once it is broken."""
        if self._group is None and not self._is_broken:
            before = self._groups.pop() if self._groups else None
            with self._breaking():
                self._group = group_of_sender(before, self._channel, device)
                self._groups.append(self._group)
        return self._group

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Leave the group where it fails within the context, and go on without it: the receiving side knows why.

        Raises:
            WeightSyncError: it is no failure of a receiver.
        """
        try:
            yield
        except StrangerError as error:
            raise WeightSyncError(f"update to version {self._version}: {error}") from error
        except WeightSyncError:
            raise
        except RuntimeError as error:
            logger.warning(
                "update to version %s: a receiver left or hung, and the rest is not sent: %s",
                self._version,
                error,
            )
            self._leave()
            forget_frames(error)

    def _leave(self) -> None:
        """Leave the group, whose other members fail then, if they have not yet."""
        self._group, self._is_broken = None, True
        while self._groups:
            self._groups.pop().close()

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
        arriving: Any = None
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
                    group.wait(arriving)
                entries = [entry_of(values) for values in message["entries"]]
                tensors = {entry.name: entry.spec.view(flat, entry.offset) for entry in entries}
                before = ReceivedBucket(version=message["version"], entries=entries, tensors=tensors)
                n_received += 1
            if before is not None:
                yield before
        except BaseException as error:
            arriving = None  # it holds the connections, too
            left, self._group = self._group, None
            if left is not None:
                left.close()
            forget_frames(error)
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
        """Return where sender and ranks meet; how many ranks, the update says once it begins."""
        if not self._storage.has_ranks:
            raise WeightSyncError(
                f"update to version {version}: transport nccl is for engines whose servers have ranks of their own; "
                "leave --update-weight-transport away"
            )
        channel = self._place.channel(n_receivers=0)
        return replace(channel, timeout_s=_PATIENCE * channel.timeout_s)

    async def arrive(self, plan: TransferPlan) -> RanksUpdate:
        """Wait until the sender has a bucket."""
        await self._place.sender_comes(plan.channel)
        return RanksUpdate(
            version=plan.version, channel=plan.channel, specs=self._storage.specs, place=self._place
        )

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
