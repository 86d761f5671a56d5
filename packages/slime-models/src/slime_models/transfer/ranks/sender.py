"""`SendingToRanks`: an update on its way to ranks of servers, bucket by bucket, by a `Carrier` of the transport's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket
from torch import Tensor

from slime_models.transfer.fingerprint import copied_fingerprints, fingerprints_of
from slime_models.transfer.manifest import aligned, bytes_of, entries_of
from slime_models.transfer.meeting import StrangerError, tell
from slime_models.transfer.ranks.group import RankGroup, forget_frames
from slime_models.transfer.ranks.membership import announce_sender, group_of_sender
from slime_models.transfer.threads import copy_all

logger = logging.getLogger(__name__)


class Carrier(Protocol):
    """Brings the buckets of one update from the sender to the ranks of a group."""

    def room(self, n_bytes: int, device: torch.device) -> Tensor:
        """Return memory for the next bucket, of tensors on this device: [n_bytes] uint8."""

    def told(self) -> Mapping[str, Any]:
        """Return what else the ranks are told of the bucket that `room` has got, in JSON's types."""

    def carry(self, flat: Tensor) -> None:
        """Bring this bucket to the ranks, which have been told of it."""

    def end(self) -> None:
        """Wait for what is left to do, after ranks have been told that no more buckets come."""

    def close(self) -> None:
        """Free what is not kept for the next update, also after an error."""


class SendingToRanks:
    """One update, being sent. A context manager; `BlockingUpdate`. Where a receiver is lost, the rest is taken and not sent.

    Args:
        plan: of the update.
        groups: the sender's, with at most one in it: that of the last update.
        carrier: makes what carries the buckets, of the group.
        backend: library that carries weights between members of a group with such devices (`RankGroup`).
    """

    makes_fingerprints = True

    def __init__(
        self,
        plan: TransferPlan,
        groups: list[RankGroup],
        *,
        carrier: Callable[[RankGroup], Carrier],
        backend: Callable[[Sequence[str]], str],
    ) -> None:
        self._plan, self._version, self._groups = plan, plan.version, groups
        self._make_carrier, self._backend = carrier, backend
        self._group: RankGroup | None = None
        self._carrier: Carrier | None = None
        self._has_met, self._is_broken = False, False

    def __enter__(self) -> SendingToRanks:
        """Begin; the first bucket says so to the other side, so that servers are paused no earlier."""
        return self

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Announce a bucket and carry it as one flat tensor; returns 0 where a receiver is lost, or there is none.

        Fingerprints that are missing are made of what is copied, while it is.

        Raises:
            WeightSyncError: a member does not know the secret, or the transport cannot reach its device.
        """
        device = bucket[0][1].device if bucket else torch.device("cpu")
        filled = self._filled_early(bucket, device, fingerprints)
        if not bucket or not self._join(device):
            made = [(name, tensor) for name, tensor in bucket if name not in fingerprints]
            fingerprints.update(fingerprints_of(made))
            return 0
        assert self._group is not None and self._carrier is not None
        if filled is None or filled.carrier is not self._carrier:
            filled = _fill(self._carrier, bucket, device, fingerprints)
        told = {"version": self._version, "n_bytes": filled.flat.numel(), **self._carrier.told()}
        with self._breaking():
            tell(self._group.told, told | {"entries": filled.entries})
            self._carrier.carry(filled.flat)
        return 0 if self._is_broken else bytes_of(bucket)

    def _filled_early(
        self, bucket: Bucket, device: torch.device, fingerprints: Fingerprint
    ) -> _Filled | None:
        """Fill memory with the first bucket while servers are paused for it; None where there is no group of the update before.

        It is of no use where the update's group turns out to be another.
        """
        if self._has_met or not bucket or not self._groups:
            return None
        (before,) = self._groups
        with self._breaking():
            announce_sender(before, self._plan)
        if self._is_broken:
            self._has_met = True
            return None
        self._carrier = self._make_carrier(before)
        return _fill(self._carrier, bucket, device, fingerprints)

    def end(self) -> None:
        """Say that there are no more buckets."""
        if self._join(torch.device("cpu")):
            assert self._group is not None and self._carrier is not None
            with self._breaking():
                tell(self._group.told, {})
                self._carrier.end()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Leave the update; after an error also the group, whose other members fail then."""
        self._group = None
        if self._carrier is not None:
            self._carrier.close()
        if kind is not None:
            self._leave()

    def _join(self, device: torch.device) -> bool:
        """Join the group, which is formed with the first bucket, so that servers are paused no earlier.

        Returns False once it is broken, and where none of the ranks is this sender's.
        """
        if not self._has_met:
            self._has_met = True
            before = self._groups.pop() if self._groups else None
            with self._breaking():
                self._group = group_of_sender(before, self._plan, device, self._backend)
            if self._carrier is not None and self._group is not before:
                self._carrier.close()
                self._carrier = None
            if self._group is not None:
                self._groups.append(self._group)
                self._carrier = self._carrier or self._make_carrier(self._group)
        return self._group is not None

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


def _offsets(bucket: Bucket) -> tuple[list[int], int]:
    """Return the bytes at which the tensors begin in a flat tensor, and its number of bytes."""
    offsets, end = list[int](), 0
    for _, tensor in bucket:
        offsets.append(end)
        end = aligned(end + tensor.nbytes)
    return offsets, end


@dataclass(frozen=True)
class _Filled:
    """A bucket in memory of a carrier."""

    carrier: Carrier
    flat: Tensor
    """[n_bytes] uint8."""
    entries: Sequence[Mapping[str, Any]]
    """Of its tensors, in JSON's types."""


def _fill(carrier: Carrier, bucket: Bucket, device: torch.device, fingerprints: Fingerprint) -> _Filled:
    """Copy the tensors to memory of a carrier, and add the fingerprints that are missing."""
    offsets, n_bytes = _offsets(bucket)
    flat = carrier.room(n_bytes, device)
    made: dict[str, tuple[Tensor, Tensor]] = {}
    others: list[tuple[Tensor, Tensor]] = []
    for (name, tensor), offset in zip(bucket, offsets, strict=True):
        place = flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if name in fingerprints:
            others.append((place, tensor))
        else:
            made[name] = place, tensor
    copy_all(others)
    fingerprints.update(zip(made, copied_fingerprints([*made.values()]), strict=True))
    entries = [
        replace(entry, offset=offset, n_bytes=entry.spec.n_bytes)
        for entry, offset in zip(entries_of(bucket, fingerprints), offsets, strict=True)
    ]
    return _Filled(carrier, flat, [vars(entry) for entry in entries])
