"""`Transport`: a way of bringing weights from a trainer to an engine, with both of its halves. Group `slime.transports`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from slime_core.errors import PluginError, WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.protocols import Fingerprint, Senders, TransferPlan
from slime_core.runtime.daemon_thread import DaemonThread
from slime_core.weights.sync import Bucket

from slime_models.groups import TRANSPORTS
from slime_models.transfer.ranks.update import RanksUpdate
from slime_models.transfer.staging import StagedUpdate
from slime_models.transfer.storage import UpdateStorage

#: Awaits a function, called with the arguments, on the trainer's thread, where it may block.
OnThread = Callable[..., Awaitable[Any]]


class OutgoingUpdate(Protocol):
    """One update, being sent. An asynchronous context manager, entered once.

    Where it has an attribute `makes_fingerprints` that is true, `put` may be given tensors without fingerprints, and adds them.
    """

    async def __aenter__(self) -> Self:
        """Begin."""

    async def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Send a bucket; returns the number of bytes sent, and no longer needs the bucket's memory then."""

    async def end(self) -> None:
        """Say that there are no more buckets."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the update, or undo it after an error: what was not ended must not arrive as an update."""


class TransportSender(Protocol):
    """The sending half of a transport: one trainer's, for all of its updates, which come one at a time."""

    def update(self, plan: TransferPlan) -> OutgoingUpdate:
        """Return the update of a plan, not begun."""


class TransportReceiver(Protocol):
    """The receiving half of a transport: one engine's, for all of its updates, which come one at a time."""

    def open(self, version: str) -> Any:
        """Return the channel for the plan of an update: all that the sending half needs to know.

        Channels are compared by `==`, and a sender may be in another process: a frozen dataclass that can be pickled.
        """

    async def arrive(self, plan: TransferPlan) -> StagedUpdate | RanksUpdate:
        """Receive the update, and return it once it is complete on this host; or once it has begun, where ranks of servers join it.

        Raises:
            WeightSyncError: a tensor is unknown, misshapen or missing, or the update is another; says which.
            DeltaBaseError: changes are to other weights than those that are staged.
        """

    def give_up(self, plan: TransferPlan) -> None:
        """Tell the sender, if it waits for the receiver, that the update will not be received."""


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A way of bringing weights from a trainer to an engine: an entry point of the group `slime.transports`."""

    name: str
    """As messages say it; that of the entry point."""
    create_sender: Callable[[OnThread], TransportSender]
    """Builds the sending half, which allocates nothing yet."""
    create_receiver: Callable[[UpdateStorage], TransportReceiver]
    """Builds the receiving half, which allocates nothing yet."""
    crosses_hosts: bool = False
    """Whether one sender's update arrives where servers on other hosts have it."""
    by_ranks: bool = False
    """Whether `arrive` returns an update that the ranks of servers join (`RanksUpdate`), not one that is staged."""
    shares_gpus: bool = False
    """Of one by ranks: whether a rank may be on the sender's GPU (`--colocate`)."""
    senders: Senders = "first"
    """Of one by ranks: which ranks of the trainer send. For the others rank 0 does."""


def transport_of(registry: Registry, plan_name: str, *, version: str) -> Transport:
    """Return the transport that settings or a plan name.

    Raises:
        WeightSyncError: none is installed under this name, or it does not import; says which are.
    """
    try:
        found: Transport = registry.resolve(TRANSPORTS.name, plan_name)
    except PluginError as error:
        raise WeightSyncError(f"update to version {version}: {error}") from error
    return found


class BlockingUpdate(Protocol):
    """One update, being sent by calls that may block; they come from one thread. A context manager, entered once."""

    def __enter__(self) -> Self:
        """Begin."""

    def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Send a bucket; see `OutgoingUpdate.put`."""

    def end(self) -> None:
        """Say that there are no more buckets."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the update, or undo it after an error."""


class UpdateOnThread:
    """Awaits the calls of a `BlockingUpdate` on a thread of its own, beside the trainer's; satisfies `OutgoingUpdate`.

    Args:
        update: entered here, and left also where entering fails.
    """

    def __init__(self, update: BlockingUpdate) -> None:
        self._update, self._thread = update, DaemonThread("weight-sender")

    async def __aenter__(self) -> UpdateOnThread:
        """Enter the update."""
        try:
            await self._on_thread(self._update.__enter__)
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    @property
    def makes_fingerprints(self) -> bool:
        """Whether `put` adds the fingerprints that it is not given."""
        return getattr(self._update, "makes_fingerprints", False)

    @property
    def folder(self) -> Path | None:
        """Folder that the update is written to, complete after `end`, and under a temporary name; None where there is none."""
        return getattr(self._update, "folder", None)

    async def put(self, bucket: Bucket, fingerprints: Fingerprint) -> int:
        """Send a bucket; returns the number of bytes that it took."""
        n_bytes: int = await self._on_thread(self._update.put, bucket, fingerprints)
        return n_bytes

    async def end(self) -> None:
        """Say that there are no more buckets."""
        await self._on_thread(self._update.end)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the update."""
        try:
            await self._on_thread(self._update.__exit__, kind, error, trace)
        finally:
            self._thread.shutdown(wait=False)

    async def _on_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class ThreadSender:
    """The sending half of a transport whose updates know nothing of one another, and block.

    Args:
        begin: returns the `BlockingUpdate` of a plan, not entered.
        on_thread: not needed: a bucket goes on another thread while the trainer's makes the next one.
    """

    def __init__(self, begin: Callable[[TransferPlan], BlockingUpdate], on_thread: OnThread) -> None:
        self._begin = begin

    def update(self, plan: TransferPlan) -> UpdateOnThread:
        """Return the update of a plan, not begun."""
        return UpdateOnThread(self._begin(plan))
