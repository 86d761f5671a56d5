"""`PhaseTimes`: what a call did and when, for whoever made the call, in this process or another."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """Something that a rank of the trainer did within one call."""

    name: str
    rank: int
    begin: float
    """Seconds from the begin of the call, on the rank's own clock: those of several machines do not agree."""
    seconds: float


class PhaseTimes:
    """Takes down the phases of one call after the other. Times are of the host: a GPU may be at work still, or later.

    Args:
        rank: of the trainer.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank, self._zero = rank, time.perf_counter()
        self.phases: list[Phase] = []
        """Of the call that began last, each after those within it."""

    def restart(self) -> None:
        """Begin a call: forget the phases of the one before."""
        self._zero, self.phases = time.perf_counter(), []

    def elapsed_s(self) -> float:
        """Return the seconds since the call began."""
        return time.perf_counter() - self._zero

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Take a block down as a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, begin, time.perf_counter())

    def add_each(self, name: str, begins: Sequence[float]) -> None:
        """Take down phases of which each lasts to the begin of the next, the last one until now (`time.perf_counter`)."""
        for begin, end in itertools.pairwise([*begins, time.perf_counter()]):
            self._add(name, begin, end)

    def total_s(self, name: str) -> float:
        """Return the seconds of all phases of a name."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)

    def _add(self, name: str, begin: float, end: float) -> None:
        self.phases.append(Phase(name, self._rank, begin - self._zero, end - begin))
