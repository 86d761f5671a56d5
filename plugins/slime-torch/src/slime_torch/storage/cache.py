"""The KV cache: one slot for each running request, as long as the longest of them needs."""

from __future__ import annotations

import math

import torch
from slime_models.family.architecture import Architecture
from torch import Tensor

from slime_torch.storage.pages import collapse

_SLOTS, _POSITIONS = 8, 16
#: What keys and values are copied as: an element at a time would take four times as long in bfloat16.
_WORD = torch.int64


class KvCache:
    """Keys and values: for each layer `[2, slot, head, position, head_dim]`.

    The slots in use are the first ones and the capacity is kept near the longest of them: attention reads all of it.
    Positions that were never written are zeros, finite, so that a mask hides them.

    Each layer lies in a buffer of its own, and one more is spare: to change its size, a layer moves into the spare one
    and leaves its own to the next layer. So nothing is allocated once the longest sequences have been seen; on a CPU that
    takes longer than the copy.

    Args:
        architecture: the model's numbers.
        max_slots: most slots.
        dtype: of what it stores; the model's attention is computed in it.
        device: where it lives.
    """

    def __init__(
        self, architecture: Architecture, *, max_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dim, self.heads = architecture.head_dim, architecture.num_query_groups
        self._max_slots, self.dtype, self._device = max_slots, dtype, device
        self._n_layers = architecture.num_layers
        self._viewed = -1
        self._views: list[tuple[Tensor, Tensor]] = []
        self.addresses: list[tuple[int, int]] = []
        """On a CPU, of each layer, where its keys and its values begin: contiguous [slots, heads, capacity, head_dim] each."""
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
        self._set([buffer.view(2, 0, self.heads, 0, self._dim) for buffer in self._buffers])

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` slots of `length` positions, not much more; keeps what is stored in them."""
        new_slots = max(self.slots, min(self._max_slots, _round_up(slots, _SLOTS)))
        wanted = _capacity(length)
        new_capacity = wanted if length > self.capacity or wanted * 5 // 4 < self.capacity else self.capacity
        if (new_slots, new_capacity) == (self.slots, self.capacity):
            return
        shape = (2, new_slots, self.heads, new_capacity, self._dim)
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
        """Return where `write` puts token i: int64 [tokens, 2 * heads], keys, then values, heads in order."""
        heads = torch.arange(2 * self.heads, device=slots.device)
        lanes = (heads // self.heads * self.slots + slots[:, None]) * self.heads + heads % self.heads
        return lanes * self.capacity + positions[:, None]

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store `keys_values` [tokens, 2 * heads, head_dim], of the cache's dtype, of one layer at `rows`."""
        self._words[layer][rows] = keys_values.view(_WORD)

    def views(self, slots: int) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values of the first slots: [slots, heads, capacity, head_dim], contiguous."""
        if self._viewed != slots:
            self._viewed = slots
            self._views = [(keys[:slots], values[:slots]) for keys, values in self._layers]
        return self._views

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another slot."""
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def _set(self, layers: list[Tensor]) -> None:
        # What a decoding step needs of them is made ready here: its time is short, and each view costs some of it.
        self._layers = layers
        if self._device.type == "cpu":
            self.addresses = [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in layers]
        self._words = [layer.view(-1, self._dim).view(_WORD) for layer in layers]
        self._viewed, self._views = -1, []

    def _buffer(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=self.dtype, device=self._device)
        if self._device.type == "cpu":
            collapse(buffer.data_ptr(), buffer.nbytes)
        return buffer


def cache_bytes(architecture: Architecture, *, slots: int, length: int, dtype: torch.dtype) -> int:
    """Return the most bytes that a cache of so many slots holds whose longest has `length` positions: the spare buffer, too."""
    a = architecture
    size = 2 * slots * a.num_query_groups * _capacity(length) * a.head_dim
    return (a.num_layers + 1) * size * dtype.itemsize


def _capacity(length: int) -> int:
    """Return positions of a slot: a sixteenth more than needed, so that copies are rare, and few unused positions are read."""
    return _round_up(length + length // 16, _POSITIONS)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
