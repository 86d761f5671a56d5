"""What trainers and engines predict of their memory before anything starts: arithmetic over settings and shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Device:
    """What ranks and engines compute on."""

    kind: Literal["cuda", "cpu"]
    """GPUs of one kind; or the CPU, whose memory all processes of the run share."""
    memory_bytes: int | None = None
    """Memory of each GPU, or of the machine; None where it is not known."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The most memory that one kind of process of a run takes: a trainer's ranks of a pipeline stage, an engine's ranks."""

    who: str
    """What they are, in words."""
    ranks: int = 1
    """How many there are."""
    parts: Mapping[str, int]
    """What each of them has on its device at its peak: name -> bytes."""
    host: Mapping[str, int] = field(default_factory=dict)
    """What each of them has in the host's memory beside that: name -> bytes. On a CPU it is one memory."""
    passing: Collection[str] = ()
    """Names of those parts that are there only while it computes."""
    stays: Collection[str] = ()
    """Names of those parts that are still on the device after it has offloaded all it can."""
    updated: Collection[str] = ()
    """Names of those that are there besides during an update, where both have offloaded: the weights that are sent or received."""
    fills: float | None = None
    """Share of what is free on its GPU when it starts that it takes, above what `parts` need; None where it takes no share, or
    which is not known."""
    first_device: int = 0
    """Of an engine: the first GPU that it takes of the run's machine. A trainer's ranks have the GPUs from 0 on."""

    @property
    def total(self) -> int:
        """Bytes on the device of each."""
        return sum(self.parts.values())

    @property
    def resting(self) -> int:
        """Bytes on the device of each while it waits for the other to compute."""
        return sum(size for name, size in self.parts.items() if name not in self.passing)

    @property
    def offloaded(self) -> int:
        """Bytes on the device of each after it has offloaded all it can."""
        return sum(size for name, size in self.parts.items() if name in self.stays)

    @property
    def updating(self) -> int:
        """Bytes on the device of each during an update, where it has offloaded all else."""
        return sum(size for name, size in self.parts.items() if name in self.stays or name in self.updated)

    @property
    def host_total(self) -> int:
        """Bytes in the host's memory of each."""
        return sum(self.host.values())


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of settings that takes less memory, and what it costs."""

    flags: Mapping[str, str]
    """The flags that make it: name with its dashes -> value, empty for a switch."""
    settings: Mapping[tuple[str, str], Any]
    """(table, field) -> the new value."""
    slower: float
    """Share of a step's time that it adds, by rule of thumb; remedies are ordered by it."""
    wants: str = ""
    """What else it needs, such as more GPUs; empty where it needs nothing."""

    @property
    def text(self) -> str:
        """The flags as they are typed."""
        return " ".join(f"{name} {value}".strip() for name, value in self.flags.items())
