"""A rollout and trackers by which SGLang servers are lost: killed in a rollout or beside training, or stopped over an update."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.plugins.hooks import hookimpl
from slime_core.rollout.rollouts import default
from slime_core.run.run import Run
from slime_core.samples import Group

#: Steps in whose rollout the first server is killed, and over whose update the second one is stopped.
KILLED_IN, STOPPED_IN = 2, 3


class Trouble:
    """Sends the signals, in the process of the run."""

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        self._replicas: Any = run.engine._replicas

    @hookimpl
    def slime_progress(self, step: int, phase: str, done: int, total: int) -> None:
        if (step, phase, done) == (STOPPED_IN, "sync", 0):
            _send(self._replicas[1], signal.SIGSTOP)


def create_tracker(build: BuildContext) -> Trouble:
    return Trouble()


class TroubleInTraining:
    """Kills the first server as a step's training begins, beside which the next step is generated."""

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        self._replicas: Any = run.engine._replicas

    @hookimpl
    def slime_progress(self, step: int, phase: str, done: int, total: int) -> None:
        if (step, phase, done) == (KILLED_IN, "train", 0):
            _send(self._replicas[0], signal.SIGKILL)


def create_killer(build: BuildContext) -> TroubleInTraining:
    return TroubleInTraining()


class TroubleOverUpdate:
    """Stops the first server as an update begins, wherever it was placed on this machine."""

    @hookimpl
    def slime_run_start(self, run: Run) -> None:
        self._replicas: Any = run.engine._replicas

    @hookimpl
    def slime_progress(self, step: int, phase: str, done: int, total: int) -> None:
        if (step, phase, done) == (KILLED_IN, "sync", 0):
            port = self._replicas[0].engine.url.rpartition(":")[2].encode()
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    if b"slime_sglang.server.launch" in words and port in words:
                        os.kill(int(folder.name), signal.SIGSTOP)


def create_stopper(build: BuildContext) -> TroubleOverUpdate:
    return TroubleOverUpdate()


async def rollout(run: Run, step: int) -> list[Group]:
    """The default one; over that of `KILLED_IN` the first server dies, and that of `STOPPED_IN` begins when it has come back."""
    replicas: Any = run.engine._replicas
    while step == STOPPED_IN and not all(replica.is_ready for replica in replicas):
        await run.engine._supervisor.changed()
    killing = asyncio.create_task(_kill_at_work(replicas[0])) if step == KILLED_IN else None
    groups = await default.rollout(run, step)
    if killing is not None:
        await killing
    return groups


async def rollout_that_all_leave(run: Run, step: int) -> list[Group]:
    """The default one; over that of `KILLED_IN` the first server dies, and over the next one all that are there."""
    replicas: Any = run.engine._replicas
    there = [replica for replica in replicas if replica.is_ready]
    victims = {KILLED_IN: there[:1], KILLED_IN + 1: there}.get(step, ())
    killing = asyncio.gather(*map(_kill_at_work, victims))
    groups = await default.rollout(run, step)
    await killing
    return groups


async def _kill_at_work(replica: Any) -> None:
    """Kill the server of a replica as soon as it has requests."""
    while not replica.pending:
        await asyncio.sleep(0)
    _send(replica, signal.SIGKILL)


def _send(replica: Any, number: int) -> None:
    os.killpg(replica.engine._server._process.pid, number)
