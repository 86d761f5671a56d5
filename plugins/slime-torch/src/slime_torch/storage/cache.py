"""What requests keep: one slot for each running request, as long as the longest of them needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slime_torch.storage.pages import collapse

_SLOTS, _POSITIONS = 8, 16
#: What keys and values are copied as: an element at a time would take four times as long in bfloat16.
_WORD = torch.int64


class Store(Protocol):
    """What the layers of one kind keep of each request."""

    @property
    def has_prefixes(self) -> bool:
        """Whether a copy of the first positions of a slot is what a prompt of these tokens alone would have left."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` slots of `length` positions, not much more; keeps what is stored in them."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what a slot holds of its first `length` positions into another slot."""

    def free(self) -> None:
        """Free all memory; what was stored is lost."""

    def predicted_bytes(self, slots: int, length: int) -> int:
        """Return the most bytes that it holds with so many slots, the longest of `length` positions."""


class Cache:
    """All that the layers of a decoder keep of its requests, a store for each kind of layers."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)

    @property
    def has_prefixes(self) -> bool:
        """Whether `copy` makes a prompt's state of that of a longer sequence; else only of the prompt's own."""
        return all(store.has_prefixes for store in self.stores)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(store.nbytes for store in self.stores)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` slots of `length` positions, not much more; keeps what is stored in them."""
        for store in self.stores:
            store.reserve(slots, length)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what a slot holds of its first `length` positions into another slot."""
        for store in self.stores:
            store.copy(source, target, length)

    def free(self) -> None:
        """Free all memory; what was stored is lost."""
        for store in self.stores:
            store.free()

    def predicted_bytes(self, slots: int, length: int) -> int:
        """Return the most bytes that it holds with so many slots, the longest of `length` positions."""
        return sum(store.predicted_bytes(slots, length) for store in self.stores)


class KvCache:
    """Vectors of each position: for each layer `[plane, slot, head, position, dim]`; planes are keys and values.

    A kind of attention that keeps something else of a position, such as one compressed vector, has other planes and heads.

    The slots in use are the first ones and the capacity is kept near the longest of them: attention reads all of it.
    Positions that were never written are zeros, finite, so that a mask hides them.

    Each layer lies in a buffer of its own, and one more is spare: to change its size, a layer moves into the spare one
    and leaves its own to the next layer. So nothing is allocated once the longest sequences have been seen; on a CPU that
    takes longer than the copy.

    Args:
        n_layers: layers of the kind.
        heads: of each plane.
        dim: of a head; such vectors have a multiple of 8 bytes.
        max_slots: most slots.
        dtype: of what it stores; the model's attention is computed in it.
        device: where it lives.
        planes: 2 for keys and values.
    """

    has_prefixes = True

    def __init__(
        self,
        n_layers: int,
        *,
        heads: int,
        dim: int,
        max_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        planes: int = 2,
    ) -> None:
        self._n_layers, self._planes, self.heads, self._dim = n_layers, planes, heads, dim
        self._max_slots, self.dtype, self._device = max_slots, dtype, device
        self._viewed = -1
        self._views: list[tuple[Tensor, ...]] = []
        self.addresses: list[tuple[int, ...]] = []
        """On a CPU, of each layer, where each of its planes begins: contiguous [slots, heads, capacity, dim] each."""
        self.free()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._spare.nbytes + sum(buffer.nbytes for buffer in self._buffers)

    def free(self) -> None:
        """Free all memory; what was stored is lost."""
        self.slots = self.capacity = 0
        self._spare = self._buffer(0)
        self._buffers = [self._buffer(0) for _ in range(self._n_layers)]
        self._set([buffer.view(self._planes, 0, self.heads, 0, self._dim) for buffer in self._buffers])

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` slots of `length` positions, not much more; keeps what is stored in them."""
        new_slots = max(self.slots, min(self._max_slots, _round_up(slots, _SLOTS)))
        wanted = _capacity(length)
        new_capacity = wanted if length > self.capacity or wanted * 5 // 4 < self.capacity else self.capacity
        if (new_slots, new_capacity) == (self.slots, self.capacity):
            return
        shape = (self._planes, new_slots, self.heads, new_capacity, self._dim)
        size, kept = math.prod(shape), min(new_capacity, self.capacity)
        layers = []
        for index, old in enumerate(self._layers):
            buffer = self._spare if len(self._spare) >= size else self._buffer(size)
            new = buffer[:size].view(shape)
            new[:, : self.slots, :, :kept] = old[:, :, :, :kept]
            new[:, : self.slots, :, kept:] = 0
            new[:, self.slots :] = 0
            layers.append(new)
            self._spare, self._buffers[index] = self._buffers[index], buffer
        self.slots, self.capacity = new_slots, new_capacity
        self._set(layers)

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return where `write` puts token i: int64 [tokens, planes * heads], keys, then values, heads in order."""
        heads = torch.arange(self._planes * self.heads, device=slots.device)
        lanes = (heads // self.heads * self.slots + slots[:, None]) * self.heads + heads % self.heads
        return lanes * self.capacity + positions[:, None]

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store `keys_values` [tokens, planes * heads, dim], of the cache's dtype, of one layer at `rows`."""
        self._words[layer][rows] = keys_values.view(_WORD)

    def views(self, slots: int) -> list[tuple[Tensor, ...]]:
        """Return each layer's planes, keys and values, of the first slots: [slots, heads, capacity, dim], contiguous."""
        if self._viewed != slots:
            self._viewed = slots
            self._views = [tuple(plane[:slots] for plane in layer) for layer in self._layers]
        return self._views

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another slot."""
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def predicted_bytes(self, slots: int, length: int) -> int:
        """Return the most bytes that it holds with so many slots, the longest of `length` positions: the spare buffer, too."""
        size = self._planes * slots * self.heads * _capacity(length) * self._dim
        return (self._n_layers + 1) * size * self.dtype.itemsize

    def _set(self, layers: list[Tensor]) -> None:
        # What a decoding step needs of them is made ready here: its time is short, and each view costs some of it.
        self._layers = layers
        if self._device.type == "cpu":
            self.addresses = [tuple(plane.data_ptr() for plane in layer) for layer in layers]
        self._words = [layer.view(-1, self._dim).view(_WORD) for layer in layers]
        self._viewed, self._views = -1, []

    def _buffer(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=self.dtype, device=self._device)
        if self._device.type == "cpu":
            collapse(buffer.data_ptr(), buffer.nbytes)
        return buffer


class StateStore:
    """State of a fixed size, such as that of a recurrence or a convolution: for each layer tensors `[slot, *shape]`.

    It is that of all tokens so far: a slot's copy is of use only for a request that has the same tokens.

    Args:
        n_layers: layers of the kind.
        parts: shape and dtype of each tensor.
        max_slots: most slots.
        device: where it lives.
    """

    has_prefixes = False

    def __init__(
        self,
        n_layers: int,
        *,
        parts: Sequence[tuple[tuple[int, ...], torch.dtype]],
        max_slots: int,
        device: torch.device,
    ) -> None:
        self._n_layers, self._parts = n_layers, tuple(parts)
        self._max_slots, self._device = max_slots, device
        self.free()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for layer in self.layers for part in layer)

    def free(self) -> None:
        """Free all memory; what was stored is lost."""
        self._slots = 0
        self.layers = [self._tensors(0) for _ in range(self._n_layers)]
        """Of each layer the tensors [slots, *shape], written in place."""

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` slots; `length` does not matter."""
        wanted = min(self._max_slots, _round_up(slots, _SLOTS))
        if wanted <= self._slots:
            return
        for index, old in enumerate(self.layers):
            new = self._tensors(wanted)
            for before, after in zip(old, new, strict=True):
                after[: self._slots] = before
            self.layers[index] = new
        self._slots = wanted

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a slot into another; it holds `length` tokens."""
        for layer in self.layers:
            for part in layer:
                part[target] = part[source]

    def predicted_bytes(self, slots: int, length: int) -> int:
        """Return the most bytes that it holds: of one layer twice, while it grows."""
        one = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._parts)
        return (self._n_layers + 1) * slots * one

    def _tensors(self, slots: int) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros(slots, *shape, dtype=dtype, device=self._device) for shape, dtype in self._parts
        )


def _capacity(length: int) -> int:
    """Return positions of a slot: a sixteenth more than needed, so that copies are rare, and few unused positions are read."""
    return _round_up(length + length // 16, _POSITIONS)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
