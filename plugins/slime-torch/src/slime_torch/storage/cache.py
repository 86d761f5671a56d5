"""What requests keep of the tokens before: keys and values in pages, and states of a fixed size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from slime_models.upload import upload
from torch import Tensor

from slime_torch.storage.huge_pages import collapse
from slime_torch.storage.page_table import PageTable

#: Tokens of a page: few, as each request leaves half a page unused, and prompts share whole pages.
PAGE_LEN = 32
_SLOTS = 8
#: What keys and values are copied as: an element at a time would take four times as long in bfloat16.
_WORD = torch.int64


class Store(Protocol):
    """What the layers of one kind keep of each request."""

    @property
    def has_prefixes(self) -> bool:
        """Whether what it holds of the first positions is what a prompt of these tokens alone would have left."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def reserve(self, slots: int, pages: int) -> None:
        """Make room for so many slots and pages; keeps what is stored in them."""

    def copy_slot(self, source: int, target: int) -> None:
        """Copy what is kept of a slot, and not in pages, into another slot."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy what a page holds into another page."""

    def free(self) -> None:
        """Free all memory; what was stored is lost."""

    def predicted_bytes(self, slots: int, pages: int) -> int:
        """Return the most bytes that it holds with so many slots and pages, while it grows."""


class Cache:
    """All that the layers of a decoder keep of its requests, a store for each kind of layers.

    Each request has a slot, and pages for its tokens in all stores alike, which it may share with others (`PageTable`).

    Args:
        stores: of the decoder's kinds of layers, in order.
        page_len: tokens of a page of theirs.
        max_slots: most requests.
        max_len: most tokens of one of them.
        device: where it lives.
        max_bytes: most bytes that it may hold; room for one request of `max_len` tokens there is whatever this says.
        max_tokens: most tokens of all requests together, those that several share counted once; what the slots and bytes allow when
            not given.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        page_len: int,
        max_slots: int,
        max_len: int,
        device: torch.device,
        max_bytes: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.stores, self.device = tuple(stores), device
        of_one = -(-max_len // page_len)
        most = max_slots * of_one
        if max_tokens is not None:
            most = min(most, -(-max_tokens // page_len))
        if max_bytes is not None:
            fixed = self._store_bytes(max_slots, 0)
            page = self._store_bytes(max_slots, 1) - fixed
            most = min(most, (max_bytes - fixed) // page - 1) if page else most
        self.most_pages = of_one
        """Pages of the longest request."""
        self._max_pages, self._n_pages, self._n_slots = max(most, of_one), 0, 0
        self._had_pages = 0
        self.n_moves = 0
        """How often what it holds has moved in memory, or may have."""
        self._table = PageTable(page_len, self._max_pages)
        self._uploaded: tuple[object, Tensor] | None = None

    @property
    def has_prefixes(self) -> bool:
        """Whether `share` makes a prompt's state of that of a longer sequence; else only of the prompt's own."""
        return all(store.has_prefixes for store in self.stores)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(store.nbytes for store in self.stores)

    @property
    def page_len(self) -> int:
        """Tokens of a page."""
        return self._table.page_len

    @property
    def max_tokens(self) -> int:
        """Tokens for which it has room."""
        return self._max_pages * self.page_len

    @property
    def usage(self) -> float:
        """Share of the pages that is in use, from 0 to 1."""
        return 1 - self._table.n_free / self._table.max_pages

    def has_room_in(self, slot: int, length: int) -> bool:
        """Return whether a slot can hold so many tokens with the pages that it has."""
        return self._table.missing(slot, length) == 0

    def has_room(self, lengths: Sequence[int]) -> bool:
        """Return whether the first slots can hold so many tokens each."""
        missing = sum(self._table.missing(slot, length) for slot, length in enumerate(lengths))
        return missing <= self._table.n_free

    def fits(self, length: int, *, shared: int = 0, spare: int = 0) -> bool:
        """Return whether an empty slot can hold so many tokens, the first `shared` of which another slot holds, and `spare` pages are left."""
        missing = self._table.pages_for(length) - shared // self.page_len
        return missing + spare <= self._table.n_free

    def hold(self, slot: int, length: int) -> None:
        """Give a slot pages for so many tokens. They must be free; memory for them is there after `reserve`."""
        self._table.grow(slot, length)

    def reserve(self, slots: int, *, as_before: bool = False) -> None:
        """Make room in memory for the first slots and all pages that were given out, or as many as there were before `free`."""
        pages = max(self._table.end, self._had_pages if as_before else 0)
        if slots <= self._n_slots and pages <= self._n_pages:
            return
        if pages > self._n_pages:
            self._n_pages = pages if pages == self._had_pages else self._grown(pages)
            self._had_pages = max(self._had_pages, self._n_pages)
        self._n_slots = max(slots, self._n_slots)
        self.n_moves += 1
        for store in self.stores:
            store.reserve(self._n_slots, self._n_pages)

    def share(self, source: int, target: int, length: int) -> tuple[int, int] | None:
        """Let an empty slot have the first `length` tokens of another one, once that holds them: `copy` does the rest then.

        Returns:
            What `copy` has to be told.
        """
        return self._table.share(source, target, length)

    def copy(self, source: int, target: int, page: tuple[int, int] | None) -> None:
        """Copy what a slot holds and does not share with one that `share` was called for, which returned `page`."""
        for store in self.stores:
            store.copy_slot(source, target)
            if page is not None:
                store.copy_page(*page)

    def move(self, source: int, target: int) -> None:
        """Let an empty slot have all that another one holds, which is empty then."""
        self._table.move(source, target)
        for store in self.stores:
            store.copy_slot(source, target)

    def release(self, slot: int) -> None:
        """Empty a slot."""
        self._table.release(slot)

    def clear(self) -> None:
        """Empty all slots; keeps the memory."""
        self._table = PageTable(self.page_len, self._max_pages)

    def free(self) -> None:
        """Empty all slots, and free all memory."""
        self.clear()
        self._n_pages = self._n_slots = 0
        self.n_moves += 1
        for store in self.stores:
            store.free()

    def page_rows(self, slots: int) -> NDArray[np.int64]:
        """Return `pages` as an array of the host, which is not to be written to."""
        return self._table.rows(slots)

    def pages(self, slots: int) -> Tensor:
        """Return the pages of the first slots in order, int64 [slots, most pages of one]; those that are too short have page 0, too."""
        rows = self._table.rows(slots)
        if self._uploaded is None or self._uploaded[0] is not rows:
            self._uploaded = rows, upload(rows, self.device)
        return self._uploaded[1]

    def predicted_bytes(self, slots: int, length: int) -> int:
        """Return the most bytes that it holds with so many slots, of `length` tokens each, while it grows."""
        pages = min(slots * self._table.pages_for(length), self._max_pages)
        return self._store_bytes(slots, self._grown(pages + 1))

    def _store_bytes(self, slots: int, pages: int) -> int:
        return sum(store.predicted_bytes(slots, pages) for store in self.stores)

    def _grown(self, pages: int) -> int:
        """Return how many pages there are once so many were needed: a quarter more, so that growing is rare."""
        return min(pages + pages // 4, self._max_pages + 1)


class KvCache:
    """Vectors of each token: for each layer `[plane, page, head, token, dim]`; planes are keys and values.

    A kind of attention that keeps something else of a token, such as one compressed vector, has other planes and heads.
    What was never written is zeros, finite, so that a mask hides it.

    Args:
        n_layers: layers of the kind.
        heads: of each plane.
        dim: of a head; such vectors have a multiple of 8 bytes.
        page_len: tokens of a page.
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
        page_len: int,
        dtype: torch.dtype,
        device: torch.device,
        planes: int = 2,
    ) -> None:
        self._n_layers, self._planes, self.heads, self._dim = n_layers, planes, heads, dim
        self.dtype, self._device, self.page_len = dtype, device, page_len
        self.addresses: list[tuple[int, ...]] = []
        """On a CPU, of each layer, where each of its planes begins: contiguous [pages, heads, page_len, dim] each."""
        self.free()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self._layers)

    def free(self) -> None:
        """Free all memory; what was stored is lost."""
        self.n_pages = 0
        self._set([self._pages(0) for _ in range(self._n_layers)])

    def reserve(self, slots: int, pages: int) -> None:
        """Make room for so many pages; `slots` does not matter."""
        if pages <= self.n_pages:
            return
        layers = self._layers
        for index in range(self._n_layers):
            grown = self._pages(pages)
            grown[:, : self.n_pages] = layers[index]
            grown[:, self.n_pages :] = 0
            layers[index] = grown
        self.n_pages = pages
        self._set(layers)

    def rows(self, page: Tensor, inside: Tensor) -> Tensor:
        """Return where `write` puts tokens in these pages, at these places inside: int64 [tokens, planes * heads], keys, then values."""
        return ((page * self.heads)[:, None] + self._lanes) * self.page_len + inside[:, None]

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store `keys_values` [tokens, planes * heads, dim], of the cache's dtype, of one layer at `rows`."""
        self._words[layer][rows] = keys_values.view(_WORD)

    def layer(self, layer: int) -> Tensor:
        """Return a layer, [planes, pages, heads, page_len, dim], keys and then values."""
        return self._layers[layer]

    def gathered(self, layer: int, pages: Tensor) -> list[Tensor]:
        """Return copies of a layer's planes as slots have them, [slots, heads, pages * page_len, dim] each; `pages` as of `Cache.pages`."""
        heads = torch.arange(self.heads, device=pages.device)[:, None]
        lanes = (pages[:, None] * self.heads + heads).flatten()
        shape = (len(pages), self.heads, pages.size(1) * self.page_len, self._dim)
        return [plane.flatten(0, 1).index_select(0, lanes).view(shape) for plane in self._layers[layer]]

    def copy_slot(self, source: int, target: int) -> None:
        """Do nothing: all is in pages."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy what a page holds into another page."""
        for layer in self._layers:
            layer[:, target] = layer[:, source]

    def predicted_bytes(self, slots: int, pages: int) -> int:
        """Return the most bytes that it holds with so many pages: of one layer twice, while it grows."""
        size = self._planes * self.heads * self.page_len * self._dim
        return (self._n_layers + 1) * pages * size * self.dtype.itemsize

    def _set(self, layers: list[Tensor]) -> None:
        # What a decoding step needs of them is made ready here: its time is short, and each view costs some of it.
        self._layers = layers
        if self._device.type == "cpu":
            self.addresses = [tuple(plane.data_ptr() for plane in layer) for layer in layers]
        self._words = [layer.view(-1, self._dim).view(_WORD) for layer in layers]
        planes, heads = (torch.arange(n, device=self._device) for n in (self._planes, self.heads))
        self._lanes = (planes[:, None] * (self.n_pages * self.heads) + heads).flatten()

    def _pages(self, count: int) -> Tensor:
        shape = (self._planes, count, self.heads, self.page_len, self._dim)
        layer = torch.empty(shape, dtype=self.dtype, device=self._device)
        if self._device.type == "cpu":
            collapse(layer.data_ptr(), layer.nbytes)
        return layer


class StateStore:
    """State of a fixed size, such as that of a recurrence or a convolution: for each layer tensors `[slot, *shape]`.

    It is that of all tokens so far: a slot's copy is of use only for a request that has the same tokens.

    Args:
        n_layers: layers of the kind.
        parts: shape and dtype of each tensor.
        device: where it lives.
    """

    has_prefixes = False

    def __init__(
        self, n_layers: int, *, parts: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        self._n_layers, self._parts, self._device = n_layers, tuple(parts), device
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

    def reserve(self, slots: int, pages: int) -> None:
        """Make room for so many slots; `pages` does not matter."""
        if slots <= self._slots:
            return
        wanted = _rounded(slots)
        for index, old in enumerate(self.layers):
            new = self._tensors(wanted)
            for before, after in zip(old, new, strict=True):
                after[: self._slots] = before
            self.layers[index] = new
        self._slots = wanted

    def copy_slot(self, source: int, target: int) -> None:
        """Copy a slot into another."""
        for layer in self.layers:
            for part in layer:
                part[target] = part[source]

    def copy_page(self, source: int, target: int) -> None:
        """Do nothing: nothing is in pages."""

    def predicted_bytes(self, slots: int, pages: int) -> int:
        """Return the most bytes that it holds: of one layer twice, while it grows."""
        one = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._parts)
        return (self._n_layers + 1) * _rounded(slots) * one

    def _tensors(self, slots: int) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros(slots, *shape, dtype=dtype, device=self._device) for shape, dtype in self._parts
        )


def _rounded(slots: int) -> int:
    return -(-slots // _SLOTS) * _SLOTS
