"""`MemoryAddress`: where the staged weights of an engine lie, for a sender on the same machine, which writes them there itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


@dataclass(frozen=True, kw_only=True)
class MemoryAddress:
    """A file in shared memory, and the place of each tensor in it."""

    path: Path
    """The file."""
    file: tuple[int, int]
    """Its device and inode number: under the same path another machine, or container, may have another file."""
    machine: str
    """Which start of which machine it belongs to."""
    n_bytes: int
    """Size of the file."""
    places: Mapping[str, tuple[int, int]] = field(repr=False)
    """Name of a tensor -> (offset, number of bytes)."""

    def opened(self, before: SharedWeights | None = None) -> SharedWeights | None:
        """Map the memory; None where this process does not see it, or may not write to it.

        Args:
            before: what was opened last, which is returned where it is the same: to map memory anew takes as long as to copy it.
        """
        if self.machine != this_machine() or _identity(self.path) != self.file:
            return None
        if before is not None and before.address == self:
            return before
        try:
            memory = torch.from_file(str(self.path), shared=True, size=self.n_bytes, dtype=torch.uint8)
        except RuntimeError:
            return None
        return SharedWeights(memory, self.places, address=self)


class SharedWeights:
    """Memory that both sides of an update have mapped.

    Args:
        memory: [n_bytes] uint8.
        places: name of a tensor -> (offset, number of bytes).
        address: where it was opened; None for memory of this process's own.
    """

    def __init__(
        self,
        memory: Tensor,
        places: Mapping[str, tuple[int, int]],
        *,
        address: MemoryAddress | None = None,
    ) -> None:
        self._memory, self._places, self.address = memory, places, address

    def room(self, name: str, n_bytes: int) -> Tensor | None:
        """Return the memory of a tensor, [n_bytes] uint8; None where there is none of this name and size."""
        offset, size = self._places.get(name, (0, -1))
        return self._memory[offset : offset + size] if size == n_bytes else None


def address_of(path: Path, *, n_bytes: int, places: Mapping[str, tuple[int, int]]) -> MemoryAddress | None:
    """Return the address of a file of this machine; None where machines cannot be told apart."""
    machine, file = this_machine(), _identity(path)
    if machine is None or file is None:
        return None
    return MemoryAddress(path=path.absolute(), file=file, machine=machine, n_bytes=n_bytes, places=places)


def this_machine() -> str | None:
    """Return what no other machine says, nor this one after its next start; None where it has no such number."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return None


def this_container() -> str:
    """Return what processes of this machine say that see one another, and of no other machine: `/proc` of all of them is the same."""
    return f"{this_machine()} {_PROCESSES.readlink()}"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
