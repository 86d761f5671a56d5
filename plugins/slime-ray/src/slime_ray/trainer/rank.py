"""`RankProcess`: the Ray actor of one rank, which builds and runs its trainer."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, cast

from slime_core.config.build import BuildContext, Rank
from slime_core.config.factories import trainer_factory
from slime_core.config.settings import Settings
from slime_core.devices.cuda_variables import cuda_defaults
from slime_core.plugins.registry import Registry
from slime_core.protocols import Columns, Fingerprint, Metrics, PooledTrainer, Trainer, TransferPlan
from slime_core.run.build import make_context
from slime_core.runtime.daemon_thread import DaemonThread
from slime_core.runtime.processes.ports import ReservedPort
from slime_core.samples import TrainBatch
from slime_core.weights.sync import Bucket, MemoryChannel

from slime_ray.process.failure import Failure
from slime_ray.process.lock import Lock, check_lock
from slime_ray.process.surroundings import Surroundings, begin_log, move_in, outlive_sigterm, use_interface_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayChannel:
    """Stands for the driver's `MemoryChannel` in a rank's plan: what rank 0 sends is asked for by `next_bucket`."""


@dataclass(frozen=True)
class RankAddress:
    """Where the process of a rank is."""

    address: str
    """IP address of its machine."""
    node: str
    """Ray's id of that."""
    pid: int


def answering[**P, T](
    method: Callable[Concatenate[RankProcess, P], Awaitable[T]],
) -> Callable[Concatenate[RankProcess, P], Awaitable[T | Failure]]:
    """Make a method return its error as a `Failure`: Ray would wrap it into a class and a text of its own."""

    @functools.wraps(method)
    async def answer(self: RankProcess, /, *args: P.args, **kwargs: P.kwargs) -> T | Failure:
        try:
            return await method(self, *args, **kwargs)
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            return Failure.of(error)

    return answer


class RankProcess:
    """One rank of the chosen trainer. All methods but `next_bucket` are called on every rank.

    What its trainer imports is imported from the first moment on, while the driver still checks the run.

    Args:
        surroundings: of this process.
        gpus: ids of the GPUs that it was given.
        pickled: the settings.
    """

    def __init__(self, surroundings: Surroundings, gpus: tuple[str, ...], pickled: bytes) -> None:
        self._began = time.monotonic()
        move_in(surroundings, gpus)
        if gpus:
            os.environ.update(cuda_defaults("trainer", os.environ))
        self._log = surroundings.log
        thread = DaemonThread("imports")
        self._importing = thread.submit(_import, pickled)
        thread.shutdown(wait=False)
        self._trainer: Trainer
        self._port: ReservedPort
        self._rank: Rank
        self._outgoing: asyncio.Queue[MemoryChannel] = asyncio.Queue()
        self._buckets: AsyncIterator[Bucket] | None = None

    async def whereabouts(self) -> tuple[RankAddress, int]:
        """Begin the log, and return where this process is, and a TCP port of this machine that is reserved until it is started."""
        import ray

        outlive_sigterm()  # on the thread of the event loop, where the trainer is
        begin_log(self._log)
        self._port = ReservedPort()
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it so
        use_interface_of(address)
        node = ray.get_runtime_context().get_node_id()
        return RankAddress(address, node, os.getpid()), self._port.number

    @answering
    async def start(self, rank: Rank, lock: Lock) -> None:
        """Build this rank of the trainer from the driver's settings, and start it.

        Args:
            rank: which rank this is.
            lock: plugins that the driver resolved.
        """
        self._rank = rank
        build, imported_at = await asyncio.wrap_future(self._importing)
        taken, called = imported_at - self._began, time.monotonic()
        logger.info("imports took %.2f s, and were done %.2f s ago", taken, called - imported_at)
        check_lock(build.registry, lock)
        factory = trainer_factory(build.settings.train, build.registry)
        self._trainer = factory(dataclasses.replace(build, rank=rank))
        await self._trainer.start()
        self._port.release()
        logger.info("the trainer is started, which took %.2f s", time.monotonic() - called)

    @answering
    async def train(self, batch_refs: Sequence[Awaitable[TrainBatch]]) -> Metrics:
        """Train on a batch, whose arrays are this machine's only copy of it and cannot be written to.

        Args:
            batch_refs: of it alone. A reference within a list is resolved here, so that an error in doing so is this rank's.
        """
        return await self._trainer.train(await batch_refs[0])

    @answering
    async def begin(self, batch_refs: Sequence[Awaitable[TrainBatch]]) -> list[Any]:
        """Begin a step; see `PooledTrainer`. Returns a reference to the columns, as `train` takes one: of rank 0 alone."""
        return self._shown(await self._pooled.begin(await batch_refs[0]))

    @answering
    async def credit(self, column_refs: Sequence[Awaitable[Columns]]) -> list[Any]:
        """Credit the step that has begun, by columns of the other roles; returns as `begin` does. Of the policy's ranks."""
        columns: dict[str, Any] = {}
        for each in column_refs:
            columns |= await each
        return self._shown(await self._pooled.credit(columns))

    @answering
    async def learn(self, column_refs: Sequence[Awaitable[Columns]]) -> Metrics:
        """Take the optimizer steps of the step that is credited."""
        return await self._pooled.learn(await column_refs[0])

    @answering
    async def send(self, plan: TransferPlan, sends: bool) -> Fingerprint:
        """Take part in sending the weights: some ranks send them, and the others help to gather them and keep none.

        By a `RayChannel`, those of rank 0, the only one that sends, wait for `next_bucket`.
        """
        channel = MemoryChannel()
        if sends:
            if not isinstance(plan.channel, RayChannel):
                return await self._trainer.send(plan)
            self._outgoing.put_nowait(channel)
            return await self._trainer.send(dataclasses.replace(plan, channel=channel))
        emptying = asyncio.ensure_future(_empty(channel))
        try:
            return await self._trainer.send(
                dataclasses.replace(plan, transport="memory", quantization=None, channel=channel)
            )
        finally:
            emptying.cancel()

    @answering
    async def next_bucket(self) -> Any:
        """Return the next bucket of `send`, packed; None after the last. Of rank 0."""
        from slime_ray.trainer.buckets import pack  # imports torch

        if self._buckets is None:
            self._buckets = (await self._outgoing.get()).buckets()
        bucket = await anext(self._buckets, None)
        if bucket is None:
            self._buckets = None
            return None
        return pack(bucket)

    @answering
    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the trainer as it is."""
        return await getattr(self._trainer, method)(*args)

    @property
    def _pooled(self) -> PooledTrainer:
        return cast("PooledTrainer", self._trainer)  # its capabilities name pools

    def _shown(self, columns: Columns) -> list[Any]:
        """Put the columns where ranks of other roles find them: they need not pass the driver."""
        import ray

        return [ray.put(columns)] if self._rank.number == 0 else []


async def _empty(channel: MemoryChannel) -> None:
    async for _ in channel.buckets():
        pass


def _import(pickled: bytes) -> tuple[BuildContext, float]:
    """Import what the trainer of the settings needs; returns what it is built from, and when that was done."""
    registry = Registry.from_environment()
    settings: Settings = pickle.loads(pickled)
    build = make_context(settings, registry)
    trainer_factory(settings.train, registry).imports()
    return build, time.monotonic()
