"""`Batch`: the tokens of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Run:
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
class Batch:
    """Tokens whose positions and slots are known: whole prompts, or the next token of each of the first slots."""

    positions: Tensor
    """Int64 [tokens]: how many tokens of its slot are before each."""
    slots: Tensor
    """Int64 [tokens]; in decoding 0, 1, 2, ..."""
    runs: tuple[Run, ...] | None = None
    """The prompts; None when decoding. A prompt's slot holds nothing of use before it."""
