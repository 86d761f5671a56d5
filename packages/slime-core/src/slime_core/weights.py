"""Moving weights from trainer to engine: choosing a transport, running both sides, proving the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from slime_core.errors import DeadlineError, WeightSyncError
from slime_core.protocols import Fingerprint, RolloutEngine, Trainer

#: Some of a model's tensors: (Hugging Face name, torch tensor in the plan's dtype).
Bucket = Sequence[tuple[str, Any]]


class MemoryChannel:
    """Transport `memory`: hands tensors over inside one process, a bucket at a time.

    The tensors belong to the sender and are valid until the next bucket is asked for; the receiver copies.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Bucket | None] = asyncio.Queue(maxsize=1)

    async def put(self, bucket: Bucket) -> None:
        """Hand a bucket over; returns once the receiver is done with the one before."""
        await self._queue.put(bucket)
        await self._queue.join()

    async def end(self) -> None:
        """Say that there are no more buckets."""
        await self._queue.put(None)

    async def buckets(self) -> AsyncIterator[Bucket]:
        """Yield the buckets until the sender ends."""
        while (bucket := await self._queue.get()) is not None:
            yield bucket
            self._queue.task_done()


def choose_transport(trainer: Trainer, engine: RolloutEngine) -> str:
    """Return the engine's best transport that the trainer also has.

    Raises:
        WeightSyncError: they have none in common.
    """
    for transport in engine.transports:
        if transport in trainer.transports:
            return transport
    raise WeightSyncError(
        f"the engine receives weights by {list(engine.transports)} and the trainer sends by "
        f"{list(trainer.transports)}; choose a pair that has one in common"
    )


async def sync_weights(trainer: Trainer, engine: RolloutEngine, *, version: str, timeout_s: float) -> str:
    """Bring the trainer's weights to the engine, and check that they arrived. Returns the transport's name.

    Both sides run under one deadline, and when one fails the other is cancelled.

    Raises:
        WeightSyncError: no common transport, a side refused, or the fingerprints differ; names the tensors.
        DeadlineError: it took longer than `timeout_s`.
    """
    transport = choose_transport(trainer, engine)
    plan = await engine.open_update(transport, version)
    try:
        async with asyncio.timeout(timeout_s):
            sent, held = await _both(trainer.send(plan), engine.receive(plan))
    except TimeoutError as error:
        raise DeadlineError(
            f"weight sync to version {version} by {transport}: not done after {timeout_s:g} s"
        ) from error
    check_fingerprints(sent, held, version=version)
    return transport


async def _both(
    send: Coroutine[Any, Any, Fingerprint], receive: Coroutine[Any, Any, Fingerprint]
) -> tuple[Fingerprint, Fingerprint]:
    """Run both sides; when one fails, cancel the other and raise its error, with a note where both failed."""
    try:
        async with asyncio.TaskGroup() as tasks:
            sending, receiving = tasks.create_task(send), tasks.create_task(receive)
    except ExceptionGroup as errors:
        first, *others = errors.exceptions
        for other in others:
            first.add_note(f"the other side failed, too: {type(other).__name__}: {other}")
        raise first from None  # the group adds nothing
    return sending.result(), receiving.result()


def check_fingerprints(sent: Fingerprint, held: Fingerprint, *, version: str) -> None:
    """Check that the engine holds what the trainer sent.

    Raises:
        WeightSyncError: names up to five tensors that differ, are missing, or are unknown.
    """
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        shown = ", ".join(
            f"{name} ({'missing in the engine' if name not in held else 'not sent' if name not in sent else 'differs'})"
            for name in wrong[:5]
        )
        raise WeightSyncError(
            f"after the update to version {version}, {len(wrong)} of {len(sent)} tensors are not the trainer's: {shown}"
        )
