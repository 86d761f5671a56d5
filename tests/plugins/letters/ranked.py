"""The tabular trainer on several ranks: each trains on the whole batch, then all wait for each other over TCP.

`TROUBLE=raise`, `die` or `stop` makes rank 1 misbehave in step 3, before it answers the others; and ranks train for some
seconds where `HALT` says (`slow_parts`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading

from slime_core.config.build import BuildContext, Rank
from slime_core.config.factories import TrainerFactory
from slime_core.protocols import Metrics, TrainerCapabilities
from slime_core.runtime.phase_times import Phase
from slime_core.samples import TrainBatch
from slime_core.testing import tabular
from slow_parts import take_time


class NoMore(Exception):
    """An error class that only this module has, and that cannot be made from its message alone."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step}: {why}")


class RankedTrainer:
    """A tabular trainer, and connections: rank 0's to all others, theirs to rank 0."""

    capabilities = TrainerCapabilities(transports=("memory",), ranked=True, phases=True)

    def __init__(self, inner: tabular.TabularTrainer, rank: Rank) -> None:
        self._inner, self._rank = inner, rank
        self._links: list[socket.socket] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def start(self) -> None:
        await asyncio.to_thread(self._connect)

    async def phases(self) -> list[Phase]:
        return [Phase("meeting", self._rank.number, 0.0, 0.0)]

    async def train(self, batch: TrainBatch) -> Metrics:
        assert self._rank.count == 1 or not batch.tokens.flags.writeable, "ranks of a machine share a batch"
        take_time(f"train {batch.step}")
        metrics = await self._inner.train(batch)
        if batch.step == 3 and self._rank.number == 1:
            misbehave(os.environ.get("TROUBLE"))
        await asyncio.to_thread(self._meet)
        return metrics | {"train/ranks": float(self._rank.count)}

    def _connect(self) -> None:
        if self._rank.number:
            while not self._links:
                try:
                    self._links = [socket.create_connection((self._rank.address, self._rank.port))]
                except ConnectionRefusedError:  # rank 0 is not there yet
                    continue
        else:
            with socket.create_server(("", self._rank.port)) as server:
                self._links = [server.accept()[0] for _ in range(self._rank.count - 1)]

    def _meet(self) -> None:
        for link in self._links:
            link.sendall(b"x")
        for link in self._links:
            if not link.recv(1):
                raise ConnectionError("connection closed by peer")


def misbehave(how: str | None) -> None:
    if how == "raise":
        raise NoMore(3, "this rank has had enough")
    if how in ("die", "stop"):
        # To this thread, not to the process: another thread would take the signal, and this one go on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGKILL if how == "die" else signal.SIGSTOP)


def create_trainer(build: BuildContext) -> RankedTrainer:
    return RankedTrainer(tabular.create_trainer(build), build.rank)


create_trainer = TrainerFactory(create_trainer, RankedTrainer.capabilities)
