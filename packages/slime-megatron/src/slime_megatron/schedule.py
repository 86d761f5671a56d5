"""Which samples of an optimizer step each data-parallel rank takes, and in which micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_core.batch import TrainBatch
from slime_core.schedule import pack_micro_batches

from slime_megatron.packed import Family
from slime_megatron.prefix import family_of, prompt_families
from slime_megatron.routed import Routes


@dataclass(frozen=True)
class Members:
    """What is in a micro-batch."""

    families: list[list[int]]
    """Positions of the samples in the batch, family by family (see `prefix`)."""
    counted: bool = True
    """Whether it counts for the loss; another one is there so that all ranks have as many."""


def rank_schedule(
    batch: TrainBatch,
    samples: Sequence[int],
    *,
    n_ranks: int,
    max_tokens: int,
    share: bool,
    cost: Callable[[Family], int] | None,
    routes: Sequence[Routes] | None = None,
) -> list[list[Members]]:
    """Cut the samples of an optimizer step into as many micro-batches for each data-parallel rank.

    Every rank computes the schedule of all. Where there are fewer samples than ranks, some get the shortest one
    uncounted.

    Args:
        batch: the step's samples.
        samples: positions in it of those of the optimizer step.
        n_ranks: data-parallel ranks.
        max_tokens: most tokens of a micro-batch.
        share: whether samples share prompts.
        cost: work of a family, by which ranks are balanced; None deals micro-batches out in turn.
        routes: see `prompt_families`.

    Returns:
        The micro-batches of each rank; together the counted ones cover every sample once.
    """
    families = prompt_families(
        batch, samples, max_tokens=max_tokens, share=share, at_least=n_ranks, routes=routes
    )
    shapes = [family_of(batch, members) for members in families]
    cut = pack_micro_batches([shape.n_tokens for shape in shapes], max_tokens, multiple_of=n_ranks)
    micros = [Members([families[k] for k in members]) for members in cut]
    costs = [0 if cost is None else sum(cost(shapes[k]) for k in members) for members in cut]
    shortest = min(samples, key=lambda i: (batch.lengths[i], i))
    while len(micros) % n_ranks:
        micros.append(Members([[shortest]], counted=False))
        costs.append(0)
    if cost is None:
        return [micros[rank::n_ranks] for rank in range(n_ranks)]
    return [[micros[k] for k in members] for members in balance(costs, n_ranks)]


def balance(costs: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Share items out so that ranks have as many each, and sums of cost as even as the largest differencing method finds.

    Source: Karmarkar and Karp, "The differencing method of set partitioning", UCB/CSD-83-113 (1982); equal numbers
    by starting from n-tuples of neighbours in order of cost, as in Michiels et al., ISAAC 2003 (balanced LDM).

    Args:
        costs: of each item; their number is a multiple of `n_ranks`.
        n_ranks: how many shares there are.

    Returns:
        Items of each rank, ascending.

    Raises:
        ValueError: the number of items is no multiple of `n_ranks`.
    """
    if len(costs) % n_ranks:
        raise ValueError(f"{len(costs)} items cannot be shared out equally among {n_ranks} ranks")
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    # A partial solution is a list of (sum, items) by descending sum; the heap has that of the largest spread on top.
    heap = []
    for start in range(0, len(order), n_ranks):
        shares = [(costs[i], [i]) for i in order[start : start + n_ranks]]
        heap.append((shares[-1][0] - shares[0][0], start, shares))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, one), (_, number, other) = heapq.heappop(heap), heapq.heappop(heap)
        both = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        both.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], number, both))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(n_ranks)]
