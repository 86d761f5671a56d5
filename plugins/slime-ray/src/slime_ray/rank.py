"""`RankProcess`: the Ray actor of one rank, which builds and runs its trainer."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import pickle
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate

from slime_core.config.build import Rank
from slime_core.config.settings import Settings
from slime_core.devices.cuda_variables import cuda_defaults
from slime_core.errors import PluginError
from slime_core.plugins.registry import Registry
from slime_core.protocols import Fingerprint, Metrics, Trainer, TransferPlan
from slime_core.run.assemble import make_build
from slime_core.samples import TrainBatch
from slime_core.weights.sync import Bucket, MemoryChannel

from slime_ray.failure import Failure
from slime_ray.surroundings import Surroundings, move_in


@dataclass(frozen=True)
class RayChannel:
    """Stands for the driver's `MemoryChannel` in a rank's plan: what rank 0 sends is asked for by `next_bucket`."""


def answering[**P, T](
    method: Callable[Concatenate[RankProcess, P], Awaitable[T]],
) -> Callable[Concatenate[RankProcess, P], Awaitable[T | Failure]]:
    """Make a method return its error as a `Failure`: Ray would wrap it into a class and a text of its own."""

    @functools.wraps(method)
    async def answer(self: RankProcess, /, *args: P.args, **kwargs: P.kwargs) -> T | Failure:
        try:
            return await method(self, *args, **kwargs)
        except Exception as error:
            logging.getLogger(__name__).exception("%s failed", method.__name__)
            return Failure.of(error)

    return answer


class RankProcess:
    """One rank of the chosen trainer. All methods but `next_bucket` are called on every rank."""

    def __init__(self, surroundings: Surroundings) -> None:
        move_in(surroundings)
        if surroundings.gpus:
            os.environ.update(cuda_defaults("trainer", os.environ))
        self._trainer: Trainer
        self._rank: Rank
        self._outgoing: asyncio.Queue[MemoryChannel] = asyncio.Queue()
        self._buckets: AsyncIterator[Bucket] | None = None

    async def whereabouts(self) -> tuple[str, int, int]:
        """Return the IP address of this machine, the process id, and a TCP port that was free a moment ago."""
        import ray

        with socket.socket() as listener:
            listener.bind(("", 0))
            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it so
            return address, os.getpid(), int(listener.getsockname()[1])

    @answering
    async def start(self, pickled: bytes, rank: Rank, lock: Sequence[Mapping[str, str]]) -> None:
        """Build this rank of the trainer from the driver's settings, and start it.

        Args:
            pickled: the settings.
            rank: which rank this is.
            lock: plugins that the driver resolved.
        """
        self._rank = rank
        registry = Registry.from_environment()
        settings: Settings = pickle.loads(pickled)
        build = make_build(settings, registry, rank=rank)
        backend = settings.train.train_backend
        self._trainer = registry.resolve("slime.trainers", backend)(build)
        _check_lock(registry.lock(), lock)
        await self._trainer.start()

    @answering
    async def train(self, batch_refs: Sequence[Awaitable[TrainBatch]]) -> Metrics:
        """Train on a batch, whose arrays are this machine's only copy of it and cannot be written to.

        Args:
            batch_refs: of it alone. A reference within a list is resolved here, so that an error in doing so is this rank's.
        """
        return await self._trainer.train(await batch_refs[0])

    @answering
    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Take part in sending the weights. By a `RayChannel`, those of rank 0 wait for `next_bucket`; others keep none."""
        if not isinstance(plan.channel, RayChannel):
            return await self._trainer.send(plan)
        channel = MemoryChannel()
        sending = asyncio.ensure_future(self._trainer.send(dataclasses.replace(plan, channel=channel)))
        if self._rank.number == 0:
            self._outgoing.put_nowait(channel)
            return await sending
        emptying = asyncio.ensure_future(_empty(channel))
        try:
            return await sending
        finally:
            emptying.cancel()

    @answering
    async def next_bucket(self) -> Any:
        """Return the next bucket of `send`, packed; None after the last. Of rank 0."""
        from slime_ray.buckets import pack  # imports torch

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


async def _empty(channel: MemoryChannel) -> None:
    async for _ in channel.buckets():
        pass


def _check_lock(own: Sequence[Mapping[str, str]], driver: Sequence[Mapping[str, str]]) -> None:
    """Check that the plugins that this rank uses are those of the driver.

    Raises:
        PluginError: one is of another version; names both.
    """
    versions = {(plugin["group"], plugin["name"]): plugin for plugin in driver}
    for plugin in own:
        other = versions.get((plugin["group"], plugin["name"]), plugin)
        if other != plugin:
            raise PluginError(
                f"{plugin['group']}: {plugin['name']!r} is {plugin['distribution']} {plugin['version']} on "
                f"{socket.gethostname()} and {other['distribution']} {other['version']} where the run was started; "
                "install the same on every machine"
            )
