"""What an engine's processes need of devices, and the places where a launcher starts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class GpuRange:
    """GPUs of one process of an engine, in a row; without GPUs its ranks."""

    first: int
    """The first, counted from the first of all that the engine has."""
    count: int = 1
    """How many."""
    name: str = field(default="", compare=False)
    """What the process is, for people: `policy 0`."""


@dataclass(frozen=True)
class EngineGpus:
    """GPUs of all processes that an engine starts."""

    total: int = 0
    """Those of its processes and those that it leaves unused, together."""
    processes: tuple[GpuRange, ...] = ()
    """Those of each process, in the order of `first`; none for an engine that starts no process on a device."""


@dataclass(frozen=True)
class Site:
    """What a process finds where it is to be started."""

    host: str
    """IP address of the machine; 127.0.0.1 where it is this one."""
    ports: tuple[int, int, int]
    """TCP ports of the machine that no other process is given; from the last one on, 14 in a row."""
    gpus: tuple[str, ...] = ()
    """Ids of its GPUs, as `CUDA_VISIBLE_DEVICES` has them; none where it is to compute on the CPU."""
    address: str | None = None
    """IP address at which other machines reach it; None where that is `host`."""


class Place(Protocol):
    """Room for one process at a time, on a machine of the launcher's. Every method raises EngineError if that is lost."""

    async def site(self) -> Site:
        """Return what the next process finds there."""

    async def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start a process.

        It ends with the run, and with everything that it starts itself, whatever ends the run.

        Args:
            command: its command line.
            environment: variables to add to those of the machine, where a process with GPUs has `devices.cuda_variables`.
            log: file, which the machine sees under this path, that its output goes to.
        """

    async def wait(self) -> int:
        """Wait until the process has ended; returns its exit status, or minus the number of the signal that ended it."""

    async def stacks(self) -> str:
        """Have the process and those that it started write their stacks to its log, those that know how (`runtime.processes.stacks`);
        returns what they wrote."""

    async def stop(self) -> None:
        """Ask the process to end, and kill it and what it started if it does not in time. Nothing if there is none."""

    async def kill(self) -> None:
        """Kill the process and what it started. Nothing if there is none."""
