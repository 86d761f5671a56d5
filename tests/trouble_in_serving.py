"""A rollout and a tracker by which two SGLang servers are lost: one killed in a rollout, the other stopped over an update."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from slime_core.build import BuildContext
from slime_core.rollout import driver
from slime_core.run import Run
from slime_core.sample import Group

#: Steps in whose rollout the first server is killed, and over whose update the second one is stopped.
KILLED_IN, STOPPED_IN = 2, 3


class Trouble:
    """Sends the signals, in the process of the run."""

    def run_start(self, run: Run) -> None:
        self._seats: Any = run.engine._seats

    def phase(self, step: int, phase: str, done: int, total: int) -> None:
        if (step, phase, done) == (KILLED_IN, "rollout", 1):
            assert self._seats[0].pending  # it dies over requests
            self._send(0, signal.SIGKILL)
        if (step, phase, done) == (STOPPED_IN, "sync", 0):
            self._send(1, signal.SIGSTOP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def run_end(self, summary: Mapping[str, Any]) -> None:
        pass

    def _send(self, seat: int, number: int) -> None:
        os.killpg(self._seats[seat].engine._server._process.pid, number)


def create_tracker(build: BuildContext) -> Trouble:
    return Trouble()


async def rollout(run: Run, step: int) -> list[Group]:
    """The default one; that of `STOPPED_IN` begins when the first server has come back."""
    seats: Any = run.engine._seats
    while step == STOPPED_IN and not all(seat.is_ready for seat in seats):
        await run.engine._keeper.changed()
    return await driver.rollout(run, step)
