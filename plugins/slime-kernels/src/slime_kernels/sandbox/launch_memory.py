"""`LaunchMemory`: every address that a launch reads and writes, held against the tensors that it was given."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_SECTOR = 32


class BoundsError(Exception):
    """A kernel reads or writes where none of its tensors is."""


class RaceError(Exception):
    """Two programs of a launch use one address in an order that nothing decides."""


class LaunchMemory:
    """The memory of one launch.

    Args:
        tensors: that it was given.
        written: storage's address -> bytes where stored elements begin; those of this launch are added.
        seeks_races: whether to remember which program used what.
    """

    def __init__(
        self, tensors: Sequence[Tensor], written: dict[int, NDArray[np.bool_]], *, seeks_races: bool
    ) -> None:
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        self._bases = np.array(sorted(storages), dtype=np.int64)
        self._sizes = np.array([storages[int(base)] for base in self._bases], dtype=np.int64)
        self.program = 0
        """Number of the program that runs, from 1."""
        self.race = ""
        """The first race that was found."""
        self.atomics = False
        self.n_stored = 0
        self._written = written
        self._seeks = seeks_races
        self._moved = {"loaded": 0, "stored": 0}
        self._touched: dict[tuple[int, str], int] = {}
        if seeks_races:
            for base, size in storages.items():
                if base not in written:
                    written[base] = np.zeros(size, dtype=bool)
            self._writer = {base: np.zeros(size, dtype=np.int32) for base, size in storages.items()}
            self._reader = {base: np.zeros(size, dtype=np.int32) for base, size in storages.items()}

    def load(self, addresses: NDArray[Any], mask: NDArray[Any], size: int) -> None:
        """Take down what is read.

        Raises:
            BoundsError: an address is in none of the tensors.
        """
        for base, offsets in self._found(addresses, mask, size, "reads", "loaded"):
            if not self._seeks:
                continue
            writer = self._writer[base][offsets]
            self._note(writer, "reads what another wrote")
            reader = self._reader[base]
            others = (reader[offsets] != 0) & (reader[offsets] != self.program)
            reader[offsets] = np.where(others, -1, self.program)

    def store(self, addresses: NDArray[Any], mask: NDArray[Any], size: int, value: NDArray[Any]) -> None:
        """Take down what is written; the same race rules as for `load`, but for two that write the same.

        Raises:
            BoundsError: an address is in none of the tensors.
        """
        values = np.broadcast_to(value, addresses.shape)[np.broadcast_to(mask, addresses.shape)].reshape(-1)
        at = self._flat(addresses, mask)
        for base, offsets in self._found(addresses, mask, size, "writes", "stored"):
            self.n_stored += offsets.size
            if not self._seeks:
                continue
            here = values[(at >= base) & (at < base + self._written[base].size)]
            differs = self._differs(base, offsets, here, size)
            writer, reader = self._writer[base], self._reader[base]
            self._note(writer[offsets][differs], "writes what another wrote")
            self._note(reader[offsets][differs], "writes what another reads")
            writer[offsets] = self.program
            self._written[base][offsets] = True

    def atomic(self, addresses: NDArray[Any], mask: NDArray[Any], size: int) -> None:
        """Take down an atomic operation: no race, and what orders programs, so that others are not looked for.

        Raises:
            BoundsError: an address is in none of the tensors.
        """
        self.atomics = True
        for base, offsets in self._found(addresses, mask, size, "updates", "stored"):
            self.n_stored += offsets.size
            if self._seeks:
                self._written[base][offsets] = True

    def traffic(self) -> dict[str, Any]:
        """Return bytes that were loaded and stored, in sectors, and (its size, bytes of sectors) of each storage that was read, and
        of each that was written: what is updated in place comes from memory and goes there."""
        touched = [[int(self._sizes[i]), moved] for (i, _), moved in self._touched.items()]
        return {"loaded": self._moved["loaded"], "stored": self._moved["stored"], "touched": touched}

    def _flat(self, addresses: NDArray[Any], mask: NDArray[Any]) -> NDArray[np.int64]:
        flat: NDArray[np.int64] = (
            addresses[np.broadcast_to(mask, addresses.shape)].reshape(-1).astype(np.int64)
        )
        return flat

    def _found(
        self, addresses: NDArray[Any], mask: NDArray[Any], size: int, what: str, kind: str
    ) -> list[tuple[int, NDArray[np.int64]]]:
        """Return (storage, offsets of bytes in it) of the addresses that the mask leaves."""
        at = self._flat(addresses, mask)
        if not at.size:
            return []
        place = np.searchsorted(self._bases, at, side="right") - 1
        bad = place < 0
        if not bad.all():
            offset = at - self._bases[np.maximum(place, 0)]
            bad |= offset + size > self._sizes[np.maximum(place, 0)]
        if bad.any():
            raise BoundsError(
                f"program {self.program - 1} {what} outside of its tensors, at {int(bad.sum())} of {at.size} addresses; "
                "mask what lies behind the end"
            )
        found = []
        for number in np.unique(place):
            mine = at[place == number]
            moved = _SECTOR * np.unique(np.concatenate([mine, mine + size - 1]) // _SECTOR).size
            self._moved[kind] += moved
            self._touched[int(number), kind] = self._touched.get((int(number), kind), 0) + moved
            found.append((int(self._bases[number]), mine - int(self._bases[number])))
        return found

    def _note(self, users: NDArray[np.int32], what: str) -> None:
        """Note a race where another program is among the users."""
        if not self.race and bool(((users != 0) & (users != self.program)).any()):
            self.race = f"a program {what} in the same launch, and nothing orders them"

    def _differs(
        self, base: int, offsets: NDArray[np.int64], values: NDArray[Any], size: int
    ) -> NDArray[np.bool_]:
        """Return where a store changes what is there."""
        raw = (ctypes.c_char * self._written[base].size).from_address(base)
        memory = np.frombuffer(raw, dtype=np.uint8)
        there = memory[offsets[:, None] + np.arange(size)]
        new = np.ascontiguousarray(values).view(np.uint8).reshape(len(offsets), -1)
        differs: NDArray[np.bool_] = (there != new[:, :size]).any(axis=1)
        return differs
