"""Which samples of an optimizer step each data-parallel rank takes, and in which micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_core.samples import TrainBatch

from slime_megatron.batch.bin_packing import pack_micro_batches
from slime_megatron.batch.trees.sharing import Routes, token_trees
from slime_megatron.batch.trees.token_tree import TokenTree


@dataclass(frozen=True)
class MicroBatchPlan:
    """Which samples are in a micro-batch."""

    trees: list[TokenTree]
    """The samples, by what they share."""
    counted: bool = True
    """Whether it counts for the loss; one that does not only gives all data-parallel ranks as many micro-batches."""


def rank_schedule(
    batch: TrainBatch,
    samples: Sequence[int],
    *,
    n_ranks: int,
    max_tokens: int,
    share: bool,
    cost: Callable[[TokenTree], int] | None,
    routes: Sequence[Routes] | None = None,
) -> list[list[MicroBatchPlan]]:
    """Divide the samples of an optimizer step into micro-batches, the same number for each data-parallel rank.

    Every rank computes the schedule of all ranks. Where there are fewer samples than ranks, the ranks without one get a
    micro-batch of the shortest sample that does not count.

    Args:
        batch: the step's samples.
        samples: positions in it of those of the optimizer step.
        n_ranks: data-parallel ranks.
        max_tokens: most tokens of a micro-batch.
        share: whether samples share tokens.
        cost: FLOPs of a tree of samples, by which ranks are balanced; None gives micro-batches to ranks in turn.
        routes: see `token_trees`.

    Returns:
        The micro-batches of each rank; together the counted ones cover every sample once.
    """
    trees = token_trees(batch, samples, max_tokens=max_tokens, share=share, at_least=n_ranks, routes=routes)
    cut = pack_micro_batches([tree.n_tokens for tree in trees], max_tokens, multiple_of=n_ranks)
    micro_batches = [MicroBatchPlan([trees[k] for k in members]) for members in cut]
    costs = [0 if cost is None else sum(cost(trees[k]) for k in members) for members in cut]
    if missing := -len(micro_batches) % n_ranks:
        shortest = min(samples, key=lambda i: (batch.lengths[i], i))
        micro_batches += [MicroBatchPlan([TokenTree.of_sample(batch, shortest)], counted=False)] * missing
        costs += [0] * missing
    if cost is None:
        return [micro_batches[rank::n_ranks] for rank in range(n_ranks)]
    return [[micro_batches[k] for k in members] for members in balance(costs, n_ranks)]


def balance(costs: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Divide items among ranks, as many to each, with sums of cost as even as the largest differencing method finds.

    Source: Karmarkar and Karp, "The differencing method of set partitioning", UCB/CSD-83-113 (1982); equal numbers
    by starting from n-tuples of neighbours in order of cost, as in Michiels et al., ISAAC 2003 (balanced LDM).

    Args:
        costs: of each item; their number is a multiple of `n_ranks`.
        n_ranks: number of ranks.

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
