"""`WeightSender`: sends a trainer's weights by any transport, quantised where the engine wants them so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.protocols import Fingerprint, TransferPlan
from slime_core.weights.sync import Bucket

from slime_models.quantization.config import FIELD, read_quantization
from slime_models.quantization.scheme import Quantization
from slime_models.transfer.fingerprint import fingerprints_of
from slime_models.transfer.transport import OnThread, OutgoingUpdate, TransportSender, transport_of


class WeightSender:
    """Sends a model's weights by whatever installed transport a plan names.

    With `disk-delta` it keeps a copy of what it sent last in the host's memory: as many bytes as the weights have in
    the plan's dtype.

    Args:
        on_thread: awaits a blocking function, called with the arguments, on a thread of the caller's.
        registry: the installed plugins.
    """

    def __init__(self, on_thread: OnThread, registry: Registry) -> None:
        self._on_thread, self._registry = on_thread, registry
        self._senders: dict[str, TransportSender] = {}
        self.last_bytes = 0
        """Bytes of weights or changes that the last update sent."""
        self.written: Callable[[Path], None] | None = None
        """Called with the folder of an update that goes by the disk, once it is complete; the engine sees it afterwards."""

    async def send(
        self, plan: TransferPlan, buckets: AsyncIterator[tuple[Bucket, Fingerprint]]
    ) -> Fingerprint:
        """Send all buckets, in the plan's dtype, each with fingerprints or none; returns the fingerprints of what was sent.

        The first bucket is asked for while the update begins, and each next one while a bucket is on its way, so two of them are
        held. Where the plan's engine serves quantised weights, each bucket is quantised before it is sent. Fingerprints that are
        missing are made here, or by a transport that can make them while it copies the tensors.

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
        outgoing = self._sender(plan).update(plan)
        if not getattr(outgoing, "makes_fingerprints", False):
            buckets = self._fingerprinted(buckets)
        making = asyncio.create_task(_next(buckets))  # also while the update begins
        on_its_way: asyncio.Task[int] | None = None
        async with AsyncExitStack() as exits:
            exits.push_async_callback(lambda: _cancelled(making))
            update = await exits.enter_async_context(outgoing)
            exits.push_async_callback(lambda: _cancelled(on_its_way))
            while (made := await making) is not None:
                bucket, found = made
                if on_its_way is not None:
                    self.last_bytes += await on_its_way
                on_its_way = asyncio.create_task(_put(update, bucket, found, sent))
                making = asyncio.create_task(_next(buckets))
            if on_its_way is not None:
                self.last_bytes += await on_its_way
            await update.end()
            folder: Path | None = getattr(update, "folder", None)
            if self.written is not None and folder is not None:
                await self._on_thread(self._publish, folder)
        return sent

    def _publish(self, folder: Path) -> None:
        """Call the function that gets folders of updates.

        Raises:
            WeightSyncError: it raised.
        """
        assert self.written is not None
        try:
            self.written(folder)
        except Exception as error:
            raise WeightSyncError(
                f"the function of --custom-update-weight-post-write-path raised {type(error).__name__}: {error}"
            ) from error

    async def _quantized(
        self, buckets: AsyncIterator[tuple[Bucket, Fingerprint]], quantization: Quantization
    ) -> AsyncIterator[tuple[Bucket, Fingerprint]]:
        async for bucket, found in buckets:
            yield await self._on_thread(quantize_bucket, bucket, found, quantization)

    async def _fingerprinted(
        self, buckets: AsyncIterator[tuple[Bucket, Fingerprint]]
    ) -> AsyncIterator[tuple[Bucket, Fingerprint]]:
        async for bucket, found in buckets:
            lacking = [(name, tensor) for name, tensor in bucket if name not in found]
            yield bucket, found | (await self._on_thread(fingerprints_of, lacking) if lacking else {})

    def _sender(self, plan: TransferPlan) -> TransportSender:
        if plan.transport not in self._senders:
            transport = transport_of(self._registry, plan.transport, version=plan.version)
            self._senders[plan.transport] = transport.create_sender(self._on_thread)
        return self._senders[plan.transport]


async def _put(update: OutgoingUpdate, bucket: Bucket, found: Fingerprint, sent: Fingerprint) -> int:
    """Send a bucket, and add its fingerprints to `sent`; returns the number of bytes."""
    n_bytes = await update.put(bucket, found)
    sent.update(found)
    return n_bytes


async def _next[T](items: AsyncIterator[T]) -> T | None:
    """Return the next one; None at the end."""
    return await anext(items, None)


async def _cancelled(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task, and wait for its end; its error is nobody's any more."""
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


def quantize_bucket(
    bucket: Bucket, found: Fingerprint, quantization: Quantization
) -> tuple[Bucket, Fingerprint]:
    """Return (the tensors that are sent in place of a bucket with these fingerprints, their fingerprints).

    Raises:
        WeightSyncError: a tensor cannot be quantised; names it.
    """
    tensors: list[tuple[str, Any]] = []
    made: list[tuple[str, Any]] = []
    kept: Fingerprint = {}
    for name, tensor in bucket:
        if quantization.covers(name, tuple(tensor.shape)):
            parts = list(quantization.tensors(name, tensor))
            tensors += parts
            made += parts
        else:
            tensors.append((name, tensor))
            kept |= {name: found[name]} if name in found else {}
    return tensors, kept | fingerprints_of(made)
