"""`PageTable`: which pages of a paged cache hold the tokens of each slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: The page that belongs to nobody: rows of a table are filled with it, so what it holds is read, and hidden by a mask.
NOBODYS = 0


class PageTable:
    """Pages of one length, each with one or several slots that read it, in the order in which a slot fills them.

    A page that several slots share is full, or one of them has a longer sequence, whose first tokens are those of the others;
    nobody writes to it again. This is arithmetic alone: memory is the caller's.
    Source of the idea: Kwon et al., "Efficient memory management for large language model serving with PagedAttention", 2023.

    Args:
        page_len: tokens of a page, a power of two.
        max_pages: most pages in use at once, page 0 not among them.
    """

    def __init__(self, page_len: int, max_pages: int) -> None:
        assert page_len & (page_len - 1) == 0, f"{page_len} is no power of two"
        self.page_len, self.max_pages = page_len, max_pages
        self._slots: list[list[int]] = []
        self._users: dict[int, int] = {}
        self._free: list[int] = []
        self.end = NOBODYS + 1
        """One more than the highest page that was ever given out: so much memory there must be."""
        self._array: NDArray[np.int64] | None = None

    @property
    def n_free(self) -> int:
        """Pages that nobody uses."""
        return self.max_pages - len(self._users)

    def pages_for(self, length: int) -> int:
        """Return how many pages hold so many tokens."""
        return -(-length // self.page_len)

    def missing(self, slot: int, length: int) -> int:
        """Return how many pages a slot lacks to hold so many tokens."""
        return max(0, self.pages_for(length) - len(self._of(slot)))

    def grow(self, slot: int, length: int) -> None:
        """Give a slot pages for so many tokens; there are enough free ones."""
        for _ in range(self.missing(slot, length)):
            self._slots[slot].append(self._take())
            self._array = None

    def share(self, source: int, target: int, length: int) -> tuple[int, int] | None:
        """Let an empty slot hold the first tokens of another slot, which has pages for them.

        Full pages are shared. Of one that is not full the target gets a page of its own.

        Returns:
            (page, copy), where the target's last tokens are to be copied from and to; None where there is nothing to copy.
        """
        assert not self._of(target), "the slot is taken"
        full = length // self.page_len
        shared = self._of(source)[:full]
        for page in shared:
            self._users[page] += 1
        self._slots[target] = list(shared)
        self._array = None
        if length % self.page_len == 0:
            return None
        self.grow(target, length)
        return self._of(source)[full], self._slots[target][full]

    def move(self, source: int, target: int) -> None:
        """Give an empty slot all that another one has."""
        assert not self._of(target), "the slot is taken"
        self._slots[target], self._slots[source] = self._of(source), []
        self._array = None

    def release(self, slot: int) -> None:
        """Take a slot's pages back."""
        for page in reversed(self._of(slot)):
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                self._free.append(page)
        self._slots[slot] = []
        self._array = None

    def rows(self, slots: int) -> NDArray[np.int64]:
        """Return the pages of the first slots in order, [slots, most pages of one of them], filled up with page 0.

        The same array as long as nothing changes.
        """
        if self._array is None or len(self._array) != slots:
            pages = [self._of(slot) for slot in range(slots)]
            self._array = np.full((slots, max(map(len, pages), default=0)), NOBODYS, np.int64)
            for row, held in zip(self._array, pages, strict=True):
                row[: len(held)] = held
        return self._array

    def _of(self, slot: int) -> list[int]:
        while slot >= len(self._slots):
            self._slots.append([])
        return self._slots[slot]

    def _take(self) -> int:
        assert self.n_free, "no page is free"
        if self._free:
            page = self._free.pop()
        else:
            page, self.end = self.end, self.end + 1
        self._users[page] = 1
        return page
