"""`WeightSender`: the sending half of a trainer, for every transport."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from slime_core.errors import WeightSyncError
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights import Bucket

from slime_models.fingerprint import fingerprint
from slime_models.quantization.config import FIELD, read_quantization
from slime_models.quantization.scheme import Quantization
from slime_models.transfer.broadcast import BroadcastSender
from slime_models.transfer.folders import DeltaWriter, DiskWriter, LastSent
from slime_models.transfer.manifest import bytes_of
from slime_models.transfer.names import TRANSPORTS

#: Runs a function on the thread where the sender may compute and wait.
OnThread = Callable[..., Awaitable[Any]]


class Outlet(Protocol):
    """Where buckets go; a context. Its calls may compute and wait, and come from one thread."""

    def __enter__(self) -> Self:
        """Begin."""

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Send a bucket; done with its memory when it returns the number of bytes that it took."""

    def end(self) -> None:
        """Say that there are no more."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make what was sent appear, or undo it after an error."""


class WeightSender:
    """Sends a model's weights by whatever transport a plan names.

    With `disk-delta` it keeps a copy of what it sent last in the host's memory: as many bytes as the weights have in
    the plan's dtype.

    Args:
        on_thread: awaits a function that may compute and wait, with its arguments, on a thread of the caller's.
    """

    transports: tuple[str, ...] = TRANSPORTS

    def __init__(self, on_thread: OnThread) -> None:
        self._on_thread = on_thread
        self._last = LastSent()
        self.last_bytes = 0
        """Bytes of weights or changes that the last update took."""

    async def send(
        self, plan: TransferPlan, buckets: AsyncIterator[tuple[Bucket, Fingerprint]]
    ) -> Fingerprint:
        """Send all buckets, in the plan's dtype and with their fingerprints; returns the fingerprints of what was sent.

        Where the plan's engine serves quantised weights, each bucket is quantised before it is sent.

        Raises:
            WeightSyncError: no such transport, the receiving side refused or went, or a tensor cannot be quantised.
            DataError: the plan's quantisation is not supported; names the field.
            CheckpointError: the folder of `disk` or `disk-delta` cannot be written.
        """
        sent: Fingerprint = {}
        self.last_bytes = 0
        quantization = read_quantization({FIELD: plan.quantization})
        if quantization is not None:
            buckets = self._quantized(buckets, quantization)
        if plan.transport == "memory":
            async for bucket, fingerprints in buckets:
                await plan.channel.put(bucket, fingerprints)
                sent |= fingerprints
                self.last_bytes += bytes_of(bucket)
            await plan.channel.end()
            return sent
        outlet = self._outlet(plan)
        try:
            await self._on_thread(outlet.__enter__)
            async for bucket, fingerprints in buckets:
                self.last_bytes += await self._on_thread(outlet.put, bucket, fingerprints)
                sent |= fingerprints
            await self._on_thread(outlet.end)
        except BaseException:
            await self._on_thread(outlet.__exit__, *sys.exc_info())
            raise
        await self._on_thread(outlet.__exit__, None, None, None)
        return sent

    async def _quantized(
        self, buckets: AsyncIterator[tuple[Bucket, Fingerprint]], quantization: Quantization
    ) -> AsyncIterator[tuple[Bucket, Fingerprint]]:
        async for bucket, fingerprints in buckets:
            yield await self._on_thread(quantize_bucket, bucket, fingerprints, quantization)

    def _outlet(self, plan: TransferPlan) -> Outlet:
        outlets: Mapping[str, Callable[[TransferPlan], Outlet]] = {
            "disk": DiskWriter,
            "disk-delta": lambda plan: DeltaWriter(plan, self._last),
            "distributed": BroadcastSender,
        }
        if plan.transport not in outlets:
            raise WeightSyncError(
                f"update to version {plan.version}: transport {plan.transport!r}; the trainer sends by "
                f"{', '.join(TRANSPORTS)}"
            )
        return outlets[plan.transport](plan)


def quantize_bucket(
    bucket: Bucket, fingerprints: Fingerprint, quantization: Quantization
) -> tuple[Bucket, Fingerprint]:
    """Return what is sent in the place of a bucket, and its fingerprints.

    Raises:
        WeightSyncError: a tensor cannot be quantised; names it.
    """
    tensors: list[tuple[str, Any]] = []
    found: Fingerprint = {}
    for name, tensor in bucket:
        if not quantization.covers(name, tuple(tensor.shape)):
            tensors.append((name, tensor))
            found[name] = fingerprints[name]
            continue
        for part, values in quantization.tensors(name, tensor):
            tensors.append((part, values))
            found[part] = fingerprint(values)
    return tensors, found
