"""Which samples share a prompt, so that it is forwarded once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from slime_core.batch import TrainBatch

from slime_megatron.packed import Family
from slime_megatron.routed import Routes


def prompt_families(
    batch: TrainBatch,
    samples: Sequence[int],
    *,
    max_tokens: int,
    share: bool,
    at_least: int = 1,
    routes: Sequence[Routes] | None = None,
) -> list[list[int]]:
    """Put samples of one group with the same prompt ids together.

    Args:
        batch: the step's samples.
        samples: positions in it.
        max_tokens: a family of more tokens than this is cut, its prompt then stands in each part.
        share: whether to; without it every sample is a family of its own.
        routes: of each sample of the batch; a prompt is shared by samples that route it alike. None where they choose
            freely.
        at_least: families that are wanted: the largest are halved until there are so many, or as many as samples.

    Returns:
        The positions of each family. Together they are `samples`, each once.
    """
    if not share:
        return [[i] for i in samples]
    by_prompt: dict[tuple[int, bytes, bytes], list[int]] = {}
    for i in samples:
        start, n = batch.offsets[i], prompt_length(batch, i)
        prompt = batch.tokens[start : start + n].tobytes()
        path = b"" if routes is None else routes[i][:n].tobytes()
        by_prompt.setdefault((int(batch.group_ids[i]), prompt, path), []).append(i)
    families = [part for members in by_prompt.values() for part in _cut(batch, members, max_tokens)]
    while len(families) < min(at_least, len(samples)):
        largest = max(families, key=len)
        families.remove(largest)
        families += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return families


def family_of(batch: TrainBatch, members: Sequence[int]) -> Family:
    """Return the lengths of a family: the last token of a response predicts nothing, and is left out."""
    return Family(
        prompt=prompt_length(batch, members[0]),
        continuations=tuple(int(batch.response_lengths[i]) - 1 for i in members),
    )


def family_tokens(batch: TrainBatch, members: Sequence[int]) -> NDArray[np.int32]:
    """Return the ids of a family in the order of the packed row."""
    first = batch.offsets[members[0]]
    parts = [batch.tokens[first : first + prompt_length(batch, members[0])]]
    parts += [
        batch.tokens[batch.offsets[i] + prompt_length(batch, i) : batch.offsets[i + 1] - 1] for i in members
    ]
    return np.concatenate(parts)


def predicting_rows(families: Sequence[Family]) -> NDArray[np.int64]:
    """Return the packed row before each response token: the prompt's last one, then the response's own but the last."""
    rows, start = [np.zeros(0, dtype=np.int64)], 0
    for family in families:
        last = start + family.prompt - 1
        start += family.prompt
        for n in family.continuations:
            rows += [np.array([last]), np.arange(start, start + n)]
            start += n
    return np.concatenate(rows)


def prompt_length(batch: TrainBatch, i: int) -> int:
    """Return the tokens of a sample's prompt."""
    return int(batch.lengths[i] - batch.response_lengths[i])


def _cut(batch: TrainBatch, members: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut a family into parts of at most `max_tokens` tokens, where one member allows it."""
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
