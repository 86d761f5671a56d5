"""The key-value cache: one slot a running request, as long as the longest of them needs."""

from __future__ import annotations

import torch
from slime_models.architecture import Architecture
from torch import Tensor

from slime_torch.pages import collapse

_SLOTS, _POSITIONS = 8, 16


class KvCache:
    """Keys and values: for each layer `[2, slot, head, position, head_dim]`.

    The slots in use are the first ones and the capacity is kept near the longest of them, so that attention
    reads a contiguous piece of memory: a batched product copies any other first. Positions that were never
    written are zeros, finite, so that a mask hides them.

    Args:
        architecture: the model's numbers.
        max_slots: most slots.
        dtype: storage dtype.
        device: where it lives.
    """

    def __init__(
        self, architecture: Architecture, *, max_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dim, self.heads = architecture.head_dim, architecture.num_query_groups
        self._max_slots, self._dtype, self._device = max_slots, dtype, device
        self._n_layers = architecture.num_layers
        self.free()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self._layers)

    def free(self) -> None:
        """Give all memory back; what was stored is lost."""
        self.slots = self.capacity = 0
        self._layers = [self._empty(0, 0) for _ in range(self._n_layers)]

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` slots of `length` positions, not much more; keeps what is stored in them."""
        new_slots = max(self.slots, min(self._max_slots, _round_up(slots, _SLOTS)))
        # A sixteenth in hand: the copy is then made once in so many tokens, and few positions are read in vain.
        wanted = _round_up(length + length // 16, _POSITIONS)
        new_capacity = wanted if length > self.capacity or wanted * 5 // 4 < self.capacity else self.capacity
        if (new_slots, new_capacity) == (self.slots, self.capacity):
            return
        kept = min(new_capacity, self.capacity)
        for index, old in enumerate(self._layers):
            new = self._empty(new_slots, new_capacity)
            new[:, : self.slots, :, :kept] = old[:, :, :, :kept]
            if self._device.type == "cpu":
                collapse(new.data_ptr(), new.nbytes)
            self._layers[index] = new
        self.slots, self.capacity = new_slots, new_capacity

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return where `write` puts token i: int64 [tokens * 2 * heads], keys, then values, heads in order."""
        heads = torch.arange(2 * self.heads, device=slots.device)
        lanes = (heads // self.heads * self.slots + slots[:, None]) * self.heads + heads % self.heads
        return (lanes * self.capacity + positions[:, None]).flatten()

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store `keys_values` [tokens, 2 * heads, head_dim] of one layer at `rows`."""
        self._layers[layer].view(-1, self._dim).index_copy_(0, rows, keys_values.reshape(-1, self._dim))

    def view(self, layer: int, slots: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first slots, each [slots * heads, capacity, head_dim], contiguous."""
        stored = self._layers[layer]
        return stored[0, :slots].flatten(0, 1), stored[1, :slots].flatten(0, 1)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another slot."""
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def _empty(self, slots: int, capacity: int) -> Tensor:
        return torch.zeros(2, slots, self.heads, capacity, self._dim, dtype=self._dtype, device=self._device)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
