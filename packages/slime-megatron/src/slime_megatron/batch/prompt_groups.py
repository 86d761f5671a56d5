"""`PromptGroup`: samples that share a prompt, which is forwarded once for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from slime_core.samples import TrainBatch

#: The experts of each token of a sample but the last, in each layer: int16 [tokens - 1, layers, topk].
Routes = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Lengths of a prefix and of the suffixes that share it: in the packed row the prefix comes once, then each suffix."""

    prefix: int
    """Tokens of the prefix, at least 1: the prompt."""
    suffixes: tuple[int, ...]
    """Tokens of each suffix, 0 or more: a response without its last token, which predicts nothing."""

    @property
    def n_tokens(self) -> int:
        """Tokens in the packed row."""
        return self.prefix + sum(self.suffixes)


def group_by_prompt(
    batch: TrainBatch,
    samples: Sequence[int],
    *,
    max_tokens: int,
    share: bool,
    at_least: int = 1,
    routes: Sequence[Routes] | None = None,
) -> list[list[int]]:
    """Put samples together that belong to one group and have the same prompt ids.

    Args:
        batch: the step's samples.
        samples: positions in it.
        max_tokens: a group of more tokens is split, and its prompt repeated in each part.
        share: whether samples share prompts; without it every sample is a group of its own.
        routes: the experts of each sample of the batch, where they are replayed: a prompt is then shared only by
            samples that route it alike.
        at_least: number of groups wanted; the largest are halved until there are so many, or one for each sample.

    Returns:
        The positions of the samples of each group. Together they are `samples`, each once.
    """
    if not share:
        return [[i] for i in samples]
    by_prompt: dict[tuple[int, bytes, bytes], list[int]] = {}
    for i in samples:
        start, n = batch.offsets[i], prompt_length(batch, i)
        prompt = batch.tokens[start : start + n].tobytes()
        path = b"" if routes is None else routes[i][:n].tobytes()
        by_prompt.setdefault((int(batch.group_ids[i]), prompt, path), []).append(i)
    groups = [part for members in by_prompt.values() for part in _cut(batch, members, max_tokens)]
    while len(groups) < min(at_least, len(samples)):
        largest = max(groups, key=len)
        groups.remove(largest)
        groups += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return groups


def prompt_group(batch: TrainBatch, members: Sequence[int]) -> PromptGroup:
    """Return the lengths of the group of some samples."""
    return prompt_groups(batch, [members])[0]


def prompt_groups(batch: TrainBatch, groups: Sequence[Sequence[int]]) -> list[PromptGroup]:
    """Return the lengths of each group of samples."""
    firsts = [members[0] for members in groups]
    prefixes = (batch.lengths[firsts] - batch.response_lengths[firsts]).tolist() if firsts else []
    members_of = [i for members in groups for i in members]
    suffixes = iter((batch.response_lengths[members_of] - 1).tolist() if members_of else [])
    return [
        PromptGroup(prefix, tuple(itertools.islice(suffixes, len(members))))
        for prefix, members in zip(prefixes, groups, strict=True)
    ]


def group_tokens(batch: TrainBatch, members: Sequence[int]) -> NDArray[np.int32]:
    """Return the ids of a group, int32 [n_tokens], in the order of the packed row."""
    first = batch.offsets[members[0]]
    parts = [batch.tokens[first : first + prompt_length(batch, members[0])]]
    parts += [
        batch.tokens[batch.offsets[i] + prompt_length(batch, i) : batch.offsets[i + 1] - 1] for i in members
    ]
    return np.concatenate(parts)


def predicting_rows(groups: Sequence[PromptGroup]) -> NDArray[np.int64]:
    """Return the packed position that predicts each response token: the prompt's last one, then the suffix's own."""
    rows, start = [np.zeros(0, dtype=np.int64)], 0
    for group in groups:
        last = start + group.prefix - 1
        start += group.prefix
        for n in group.suffixes:
            rows += [np.array([last]), np.arange(start, start + n)]
            start += n
    return np.concatenate(rows)


def prompt_length(batch: TrainBatch, i: int) -> int:
    """Return the tokens of a sample's prompt."""
    return int(batch.lengths[i] - batch.response_lengths[i])


def _cut(batch: TrainBatch, members: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split a group into parts of at most `max_tokens` tokens; a member that is longer is alone."""
    prompt = prompt_length(batch, members[0])
    parts: list[list[int]] = []
    room = 0
    for i in members:
        tokens = int(batch.response_lengths[i]) - 1
        if not parts or tokens > room:
            parts.append([])
            room = max_tokens - prompt
        parts[-1].append(i)
        room -= tokens
    return parts
