"""`Batch`: the tokens of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class PromptRun:
    """Prompts of one length that follow one another."""

    tokens: slice
    """Where they are among the batch's tokens."""
    prompts: int
    """How many."""
    length: int
    """Tokens of each."""
    slots: Tensor
    """Int64 [prompts]: the slot of each."""


@dataclass(frozen=True)
class Prompts:
    """Whole prompts, one after another."""

    runs: tuple[PromptRun, ...]
    """Those of one length each."""
    ends: Tensor
    """Int32 [prompts + 1]: where each begins among the batch's tokens, and where the last one ends."""
    longest: int
    """Tokens of the longest."""


@dataclass(frozen=True)
class Batch:
    """Tokens whose positions and slots are known: whole prompts, or the next token of each of the first slots."""

    positions: Tensor
    """Int64 [tokens]: how many tokens of its slot are before each."""
    slots: Tensor
    """Int64 [tokens]; in decoding 0, 1, 2, ..."""
    pages: Tensor
    """Int64 [slots, most pages of one]: the pages of each slot, in order (`Cache.pages`)."""
    page_len: int
    """Tokens of a page, a power of two."""
    prompts: Prompts | None = None
    """None when decoding. A prompt's slot holds nothing of use before it."""

    @cached_property
    def page(self) -> Tensor:
        """Int64 [tokens]: the page that each token is kept in."""
        return self.pages[self.slots, self.positions // self.page_len]

    @cached_property
    def inside(self) -> Tensor:
        """Int64 [tokens]: the place of each token in its page."""
        return self.positions % self.page_len

    @property
    def most_held(self) -> int:
        """No slot holds more tokens."""
        return self.pages.size(1) * self.page_len
