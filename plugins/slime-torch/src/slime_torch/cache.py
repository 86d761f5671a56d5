"""The key-value cache: one slot a running request, grown by need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slime_models.architecture import Architecture
from torch import Tensor

_ROUND = 64


class KvCache:
    """Keys and values of all layers, `[layer, 2, slot, head, position, head_dim]`.

    Slots and positions that were never written hold zeros, so that they are finite and a mask can hide them.

    Args:
        architecture: the model's numbers.
        max_slots: most slots.
        max_length: most positions of a slot.
        dtype: storage dtype.
        device: where it lives.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        max_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layers, self._dim = architecture.num_layers, architecture.head_dim
        self.heads = architecture.num_query_groups
        self._max_slots, self._max_length = max_slots, max_length
        self._options = {"dtype": dtype, "device": device}
        self.free()

    def free(self) -> None:
        """Give all memory back; what was stored is lost."""
        self.slots = self.capacity = 0
        self.data = torch.zeros(self._layers, 2, 0, self.heads, 0, self._dim, **self._options)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` slots of `length` positions; keeps what is stored."""
        if slots <= self.slots and length <= self.capacity:
            return
        new_slots = max(self.slots, min(self._max_slots, _round_up(slots, 8)))
        new_capacity = self.capacity
        if length > self.capacity:
            # Half as much again, so that growing token by token copies each position a bounded number of times.
            grown = max(length, self.capacity * 3 // 2)
            new_capacity = min(_round_up(self._max_length, _ROUND), _round_up(grown, _ROUND))
        data = torch.zeros(self._layers, 2, new_slots, self.heads, new_capacity, self._dim, **self._options)
        data[:, :, : self.slots, :, : self.capacity] = self.data
        self.data, self.slots, self.capacity = data, new_slots, new_capacity

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return where `write` puts token i: int64 [tokens * 2 * heads], keys before values, heads in order."""
        heads = torch.arange(2 * self.heads, device=slots.device)
        lanes = (heads // self.heads * self.slots + slots[:, None]) * self.heads + heads % self.heads
        return (lanes * self.capacity + positions[:, None]).flatten()

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store `keys_values` [tokens, 2 * heads, head_dim] of one layer at `rows`."""
        self.data[layer].view(-1, self._dim).index_copy_(0, rows, keys_values.reshape(-1, self._dim))

    def view(self, layer: int, slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first slots, each [slots * heads, length, head_dim], not copied."""
        keys, values = self.data[layer, :, :slots, :, :length].flatten(1, 2).unbind(0)
        return keys, values

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of a slot into other slots."""
        for target in targets:
            self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
