"""Weight sync from trainer to engine: choosing a transport, sending and receiving, comparing fingerprints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime_core.errors import DeltaBaseError, Problem, ReceiverLostError, WeightSyncError
from slime_core.protocols import (
    EngineCapabilities,
    Fingerprint,
    RolloutEngine,
    Trainer,
    TrainerCapabilities,
    TransferPlan,
)
from slime_core.runtime.deadline import within

if TYPE_CHECKING:
    from slime_core.config.sections import TrainSection
    from slime_core.plugins.registry import Registry

logger = logging.getLogger(__name__)

#: Seconds that an engine may have others start in the place of lost receivers: its own deadlines come first.
_START_S = 4 * 3600.0
#: How often an update is sent of which receivers are lost, one after the other.
_TRIES = 5

#: Some of a model's tensors: (Hugging Face name, torch tensor in the plan's dtype).
Bucket = Sequence[tuple[str, Any]]


class MemoryChannel:
    """Transport `memory`: hands tensors over inside one process, a bucket at a time.

    The tensors belong to the sender and are valid until the next bucket is asked for; the receiver copies.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Bucket | None] = asyncio.Queue(maxsize=1)
        self.fingerprints: Fingerprint = {}
        """Fingerprints that the sender computed of tensors that it has sent."""

    async def put(self, bucket: Bucket, fingerprints: Fingerprint | None = None) -> None:
        """Send a bucket, with its fingerprints if they are known; returns once the receiver has copied it."""
        self.fingerprints |= fingerprints or {}
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


class Agreement:
    """The weight update that an engine expects next. Any other is refused before any weight is written."""

    def __init__(self) -> None:
        self._plan: TransferPlan | None = None
        self._in_flight = False

    def open(self, plan: TransferPlan) -> TransferPlan:
        """Expect this update instead of any earlier one that was not received; returns its plan."""
        self._plan = plan
        return plan

    @contextmanager
    def taking(self, plan: TransferPlan) -> Iterator[None]:
        """Receive the expected update inside the block; afterwards none is expected.

        Raises:
            WeightSyncError: another update is in flight, or this is not the one agreed on: it has another version, is
                of an earlier agreement, or was received before.
        """
        where = f"update to version {plan.version}"
        if self._in_flight:
            raise WeightSyncError(f"{where}: another one is in flight; await it first")
        if plan != self._plan:
            raise WeightSyncError(
                f"{where}: {self._other(plan)}; receive what open_update returned last, once"
            )
        self._plan, self._in_flight = None, True
        try:
            yield
        finally:
            self._in_flight = False

    def _other(self, plan: TransferPlan) -> str:
        if self._plan is None:
            return "the engine has agreed on no update, or has taken it already"
        if plan.version != self._plan.version:
            return f"the engine has agreed on version {self._plan.version}"
        return "the engine has agreed on this version anew since"


def wanted_transport(section: TrainSection) -> str | None:
    """Return the name of the transport that the settings ask for: `disk`, `disk-delta`, ...; None leaves the choice."""
    if section.update_weight_mode == "delta":
        return f"{section.update_weight_transport or 'disk'}-delta"
    return section.update_weight_transport


def transport_problems(
    section: TrainSection,
    who: str,
    capabilities: EngineCapabilities | TrainerCapabilities,
    registry: Registry,
) -> Iterable[Problem]:
    """Return what is wrong where `who`, a trainer or an engine, lacks the transport that the settings ask for."""
    wanted = wanted_transport(section)
    if wanted is None or wanted in capabilities.transports:
        return
    named = (
        wanted == section.update_weight_transport
    )  # then `checks.chosen_plugins` says whether it is installed
    installed = named or wanted in {plugin.name for plugin in registry.plugins("slime.transports")}
    if not (capabilities.takes(wanted) and installed):
        yield Problem(
            "train.update_weight_transport",
            f"{wanted}, which the {who} lacks",
            f"one of {', '.join(capabilities.transports)}",
            "it is --update-weight-transport, with -delta where --update-weight-mode is delta",
        )


def choose_transport(trainer: Trainer, engine: RolloutEngine, wanted: str | None = None) -> str:
    """Return the transport `wanted`, or, if that is None, the engine's best one that the trainer also has.

    Raises:
        WeightSyncError: they have none in common, or not this one.
    """
    receives, sends = engine.capabilities, trainer.capabilities
    for transport in receives.transports if wanted is None else (wanted,):
        if receives.takes(transport) and sends.takes(transport):
            return transport
    raise WeightSyncError(
        f"{'' if wanted is None else f'transport {wanted}: '}the engine receives weights by {_listed(receives)} "
        f"and the trainer sends by {_listed(sends)}; choose one that both have "
        "(--update-weight-transport), or another pair"
    )


def _listed(capabilities: EngineCapabilities | TrainerCapabilities) -> str:
    return f"{list(capabilities.transports)}{' and others' if capabilities.other_transports else ''}"


async def sync_weights(
    trainer: Trainer, engine: RolloutEngine, *, version: str, timeout_s: float, transport: str | None = None
) -> str:
    """Send the trainer's weights to the engine, and compare fingerprints. Returns the transport's name.

    Both sides run under one deadline, each time that an update is sent, and when one fails the other is cancelled. An engine that has
    lost all receivers has them start before, by deadlines of its own. When the engine cannot apply a delta to what it keeps, all
    weights are sent, once in a row; when it has lost a receiver of either, and others are to take the update again, it is sent up to
    `_TRIES` times.

    Raises:
        WeightSyncError: no common transport, a side refused, or the fingerprints differ; names the tensors.
        DeadlineError: an update took longer than `timeout_s`.
    """
    transport = choose_transport(trainer, engine, transport)

    async def once() -> tuple[Fingerprint, Fingerprint]:
        what = f"weight sync to version {version} by {transport}"
        plan = await within(_START_S, f"{what}: receivers that start", engine.open_update(transport, version))
        return await within(timeout_s, what, _both(trainer.send(plan), engine.receive(plan)))

    async def update() -> tuple[Fingerprint, Fingerprint]:
        tries, asked_for_all = 0, False
        while True:
            try:
                return await once()
            except DeltaBaseError as error:
                if asked_for_all:
                    raise
                asked_for_all = True
                logger.warning("%s; sending all weights", error)
            except ReceiverLostError as error:
                tries, asked_for_all = tries + 1, False
                if tries == _TRIES:
                    raise
                logger.warning("%s; sending it again", error)

    sent, held = await update()
    check_fingerprints(sent, held, version=version)
    logger.info("the engine has the weights of version %s, by transport %s", version, transport)
    return transport


async def _both(
    send: Coroutine[Any, Any, Fingerprint], receive: Coroutine[Any, Any, Fingerprint]
) -> tuple[Fingerprint, Fingerprint]:
    """Run both sides; when one fails, cancel the other and raise its error, with a note where both failed.

    Where the engine has lost a receiver, the trainer comes to its end first: it is to send again.
    """
    lost: list[ReceiverLostError] = []

    async def received() -> Fingerprint:
        try:
            return await receive
        except ReceiverLostError as error:
            lost.append(error)
            return {}

    try:
        async with asyncio.TaskGroup() as tasks:
            sending, receiving = tasks.create_task(send), tasks.create_task(received())
    except ExceptionGroup as errors:
        first, *others = errors.exceptions
        for other in others:
            first.add_note(f"the other side failed, too: {type(other).__name__}: {other}")
        raise first from None  # the group adds nothing
    if lost:
        raise lost[0]
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
