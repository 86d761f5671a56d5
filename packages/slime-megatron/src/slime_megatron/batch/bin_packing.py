"""Cutting the samples of an optimizer step into micro-batches that fit into memory."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def pack_micro_batches(lengths: Sequence[int], max_tokens: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Cut samples into as few micro-batches of at most `max_tokens` tokens as first-fit-decreasing finds.

    The tokens are then spread evenly over that many micro-batches where the limit allows it. A longer sample gets
    a micro-batch of its own, and a warning. The same lengths always give the same cut.

    Args:
        lengths: [N] tokens of each sample, prompt included.
        max_tokens: most tokens of a micro-batch, at least 1.
        multiple_of: there are as many micro-batches as a multiple of this, the number of data-parallel ranks, unless
            there are too few samples: then each has a micro-batch of its own.

    Returns:
        Positions of the samples of each micro-batch, ascending; micro-batches by their first position. Together
        they cover every sample once.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; wanted at least 1")
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    oversize = [i for i in by_length if lengths[i] > max_tokens]
    if oversize:
        logger.warning(
            "%d of %d samples are longer than max_tokens_per_gpu, %d (the longest has %d tokens); each gets a "
            "micro-batch of its own",
            len(oversize),
            len(lengths),
            max_tokens,
            lengths[oversize[0]],
        )
    fitting = by_length[len(oversize) :]
    packed = _first_fit(fitting, lengths, max_tokens)
    wanted = -(-(len(oversize) + len(packed)) // multiple_of) * multiple_of
    packed = _split(packed, lengths, min(wanted - len(oversize), len(fitting)))
    even = _spread(fitting, lengths, len(packed))
    if all(sum(lengths[i] for i in batch) <= max_tokens for batch in even):
        packed = even
    return sorted(sorted(batch) for batch in [[i] for i in oversize] + packed)


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each sample into the first micro-batch that has room for it."""
    # A tree of the most room below each node finds it without looking at all micro-batches: node n has the children 2n and
    # 2n + 1, the leaves are micro-batches, empty ones last. At most one is left that is not half full.
    most_batches = 2 * sum(lengths[i] for i in order) // max_tokens + 2
    leaves = 1 << most_batches.bit_length()
    room = [max_tokens] * (2 * leaves)
    batches: list[list[int]] = [[] for _ in range(leaves)]
    for i in order:
        tokens, node = lengths[i], 1
        while node < leaves:
            node *= 2
            if room[node] < tokens:
                node += 1
        batches[node - leaves].append(i)
        room[node] -= tokens
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            most = left if left > right else right
            if room[node] == most:
                break
            room[node] = most
    return [batch for batch in batches if batch]


def _split(batches: list[list[int]], lengths: Sequence[int], n_batches: int) -> list[list[int]]:
    """Halve the micro-batches with the most samples until there are `n_batches`."""
    while len(batches) < n_batches:
        largest = max(batches, key=len)
        batches.remove(largest)
        batches += _spread(largest, lengths, 2)
    return batches


def _spread(order: Sequence[int], lengths: Sequence[int], n_batches: int) -> list[list[int]]:
    """Put each sample into the micro-batch that has the fewest tokens so far."""
    batches: list[list[int]] = [[] for _ in range(n_batches)]
    filled = [(0, k) for k in range(n_batches)]
    for i in order:
        tokens, k = heapq.heappop(filled)
        batches[k].append(i)
        heapq.heappush(filled, (tokens + lengths[i], k))
    return batches
