"""`RankReceiver`: one rank of a server, which receives updates bucket by bucket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_models.transfer.manifest import Entry, entry_of
from slime_models.transfer.meeting import BroadcastChannel, group_errors, hear
from slime_models.transfer.ranks.group import RankGroup, forget_frames
from slime_models.transfer.ranks.membership import group_of_rank
from slime_models.transfer.ranks.shared_buffer import OpenedBuffers

#: In an announcement: where a bucket lies that the rank reads from the sender's memory; without it the bucket is broadcast.
BUFFER = "buffer"


@dataclass(frozen=True, kw_only=True)
class ReceivedBucket:
    """A bucket at a rank of a server."""

    version: str
    entries: Sequence[Entry]
    tensors: dict[str, Tensor]
    """By name, in the order of the entries; valid until the next bucket is asked for."""


class RankReceiver:
    """One rank of a server, for all of its updates.

    Args:
        device: of its weights.
        keeps: whether host memory of the sender's stays mapped from update to update, for a server that ends with the run.
    """

    def __init__(self, device: torch.device, *, keeps: bool = False) -> None:
        self._device = device
        self._groups: list[RankGroup] = []
        self._flats = [torch.empty(0, dtype=torch.uint8)] * 2
        self._opened = OpenedBuffers(device, keeps=keeps)

    def buckets(self, channel: BroadcastChannel, rank: int) -> Iterator[ReceivedBucket]:
        """Join an update as one of its ranks, and yield its buckets, sender by sender; the next one arrives while the caller has one.

        Raises:
            WeightSyncError: the sender left or hung, does not know the channel's secret, or has memory that is out of reach. The
                groups are left then.
        """
        try:
            for turn in itertools.count():
                with group_errors():
                    group = group_of_rank(self._groups, channel, rank, self._device, turn)
                    self._groups[turn : turn + 1] = [group]
                if first := _heard(group):
                    read = self._shared if BUFFER in first else self._broadcast
                    yield from read(group, first)
                if turn + 1 == group.member.n_turns:
                    break
            for left in self._groups[turn + 1 :]:
                left.close()
            del self._groups[turn + 1 :]
        except BaseException as error:
            while self._groups:
                self._groups.pop().close()
            forget_frames(error)
            raise
        finally:
            self._flats = [torch.empty(0, dtype=torch.uint8)] * 2
            self._opened.end()

    def _broadcast(self, group: RankGroup, first: Mapping[str, Any]) -> Iterator[ReceivedBucket]:
        """Yield buckets that are broadcast: one arrives in a buffer while the caller has what is in the other."""
        message, before, number = first, None, 0
        while message:
            with group_errors():
                flat = self._flat_of(number % 2, message["n_bytes"], group.device)
                arriving = group.broadcast(flat)
            if before is not None:
                yield before
            with group_errors():
                group.wait(arriving)
            del arriving  # it holds the connections, too
            before = _bucket(message, flat)
            number += 1
            message = _heard(group)
        if before is not None:
            yield before

    def _shared(self, group: RankGroup, first: Mapping[str, Any]) -> Iterator[ReceivedBucket]:
        """Yield buckets that lie in the sender's memory: it fills one buffer while the caller has what is in the other."""
        message = first
        while message:
            bucket = _bucket(
                message, self._opened.flat(message[BUFFER], group.member.number, message["n_bytes"])
            )
            yield bucket
            bucket.tensors.clear()  # so that nobody holds the sender's memory
            if self._device.type == "cuda":  # what reads the bucket is queued
                torch.cuda.current_stream(self._device).synchronize()
            message = _heard(group)
            if not message:
                self._opened.end()  # before the sender frees a GPU's memory
            with group_errors():
                group.meet()

    def _flat_of(self, number: int, n_bytes: int, device: torch.device) -> Tensor:
        if self._flats[number].numel() < n_bytes:
            self._flats[number] = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        return self._flats[number][:n_bytes]


def _heard(group: RankGroup) -> Mapping[str, Any]:
    with group_errors():
        return hear(group.told)


def _bucket(message: Mapping[str, Any], flat: Tensor) -> ReceivedBucket:
    entries = [entry_of(values) for values in message["entries"]]
    tensors = {entry.name: entry.spec.view(flat, entry.offset) for entry in entries}
    return ReceivedBucket(version=message["version"], entries=entries, tensors=tensors)
