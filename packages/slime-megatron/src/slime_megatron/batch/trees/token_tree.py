"""`TokenTree`: samples that begin alike, whose common tokens are forwarded once for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from slime_core.samples import TrainBatch


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Lengths of samples and of what each has in common with the one before it: a tree of tokens, in depth-first order.

    In the packed row a sample's tokens follow those of the samples before it, without the ones that it shares. A shared prompt
    is the tree of one level; turns of a conversation share all that was said before, and forks what was said until they part.
    """

    lengths: tuple[int, ...]
    """Tokens of each sample, at least 1: all but its last one, which predicts nothing."""
    shared: tuple[int, ...]
    """First tokens that each has in common with the one before it; 0 begins a tree of its own, as the first does."""
    prompts: tuple[int, ...]
    """Tokens of each prompt, the last of which predicts the first response token; more than its tokens: it predicts nothing."""
    members: tuple[int, ...] = ()
    """Positions of the samples in the batch; empty where there is none, as for padding."""

    @classmethod
    def of_prompt(cls, prompt: int, suffixes: Sequence[int] = ()) -> TokenTree:
        """Return the tree of a prompt, and of responses without their last tokens; without any it predicts nothing."""
        n = max(1, len(suffixes))
        lengths = tuple(prompt + suffix for suffix in suffixes) or (prompt,)
        return cls(lengths, (0,) + (prompt,) * (n - 1), (prompt if suffixes else prompt + 1,) * n)

    @classmethod
    def of_sample(cls, batch: TrainBatch, i: int) -> TokenTree:
        """Return the tree of one sample of a batch."""
        return cls((int(batch.lengths[i]) - 1,), (0,), (prompt_length(batch, i),), (i,))

    @property
    def n_tokens(self) -> int:
        """Tokens in the packed row."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The positions [start, stop) in its sequence of what each sample adds to the row."""
        return tuple(zip(self.shared, self.lengths, strict=True))

    @property
    def n_predicted(self) -> int:
        """Response tokens of all samples, those that several have counted for each."""
        return sum(
            max(0, length - prompt + 1) for length, prompt in zip(self.lengths, self.prompts, strict=True)
        )

    def paths(self) -> Iterator[NDArray[np.int64]]:
        """Yield, for each sample, the indices in the packed row of its tokens, in order."""
        path, start = np.zeros(0, dtype=np.int64), 0
        for shared, length in self.spans:
            path = np.concatenate([path[:shared], np.arange(start, start := start + length - shared)])
            yield path

    def part(self, start: int, stop: int) -> TokenTree:
        """Return the tree of consecutive samples, of which the first shares nothing."""
        own = slice(start, stop)
        shared = (0, *self.shared[start + 1 : stop])
        return TokenTree(self.lengths[own], shared, self.prompts[own], self.members[own])

    def ids(self, batch: TrainBatch, *, ahead: int = 0) -> NDArray[np.int32]:
        """Return the ids of the packed row, int32 [n_tokens]; or those so many positions `ahead` of each token."""
        starts = batch.offsets[list(self.members)] + ahead
        return np.concatenate(
            [
                batch.tokens[first + start : first + stop]
                for first, (start, stop) in zip(starts, self.spans, strict=True)
            ]
        )


def predicting_rows(trees: Sequence[TokenTree]) -> NDArray[np.int64]:
    """Return the packed position that predicts each response token: of a prompt's last one, then of the response's own."""
    rows, start = [np.zeros(0, dtype=np.int64)], 0
    for tree in trees:
        rows += [start + path[prompt - 1 :] for path, prompt in zip(tree.paths(), tree.prompts, strict=True)]
        start += tree.n_tokens
    return np.concatenate(rows)


def prompt_length(batch: TrainBatch, i: int) -> int:
    """Return the tokens of a sample's prompt."""
    return int(batch.lengths[i] - batch.response_lengths[i])
