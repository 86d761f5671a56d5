"""`token_trees`: which samples of a batch begin alike, and where they part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from slime_core.samples import TrainBatch

from slime_megatron.batch.trees.token_tree import TokenTree, prompt_length

#: The experts of each token of a sample but the last, in each layer: int16 [tokens - 1, layers, topk].
Routes = NDArray[np.int16]

#: Samples part where others have parted before, unless going on together saves at least so many tokens: each place where samples
#: part is one more batch of attention, and responses of one policy often begin with the same few words.
_LEAST_SAVED = 16


def token_trees(
    batch: TrainBatch,
    samples: Sequence[int],
    *,
    max_tokens: int,
    share: bool,
    at_least: int = 1,
    routes: Sequence[Routes] | None = None,
) -> list[TokenTree]:
    """Put the samples of each group together that begin alike: by their ids, which positions follow from.

    Args:
        batch: the step's samples.
        samples: positions in it.
        max_tokens: a tree of more tokens is split, and what is shared repeated in each part.
        share: whether samples share tokens; without it each is a tree of its own.
        routes: the experts of each sample of the batch, where they are replayed: tokens are then shared only as far as
            samples route them alike.
        at_least: number of trees wanted; the largest are halved until there are so many, or one for each sample.

    Returns:
        The trees. Together their members are `samples`, each once.
    """
    if not share:
        return [TokenTree.of_sample(batch, i) for i in samples]
    groups: dict[int, list[int]] = {}
    for i in samples:
        groups.setdefault(int(batch.group_ids[i]), []).append(i)
    whole = [tree for members in groups.values() for tree in _trees_of(batch, members, routes)]
    trees = [part for tree in whole for part in _cut(tree, max_tokens)]
    while len(trees) < min(at_least, len(samples)):
        largest = max(trees, key=lambda tree: len(tree.members))
        trees.remove(largest)
        n = len(largest.members)
        trees += [largest.part(0, n // 2), largest.part(n // 2, n)]
    return trees


def _trees_of(batch: TrainBatch, members: Sequence[int], routes: Sequence[Routes] | None) -> list[TokenTree]:
    """Return the trees of some samples, those that share nothing apart."""
    ids = {i: batch.tokens[batch.offsets[i] : batch.offsets[i + 1] - 1] for i in members}
    order = sorted(members, key=lambda i: _sort_key(ids[i], None if routes is None else routes[i]))
    common = [0]
    for one, other in pairwise(order):
        n = _common(ids[one], ids[other])
        common.append(n if routes is None else _common(routes[one][:n], routes[other][:n]))
    tree = _arranged(order, [len(ids[i]) for i in order], common, [prompt_length(batch, i) for i in order])
    starts = [k for k, shared in enumerate(tree.shared) if shared == 0]
    return [tree.part(start, stop) for start, stop in pairwise([*starts, len(members)])]


def _sort_key(ids: NDArray[np.int32], routes: Routes | None) -> bytes:
    """Return what brings samples together that begin alike; one that others go on from comes after them, and adds nothing."""
    parts = [ids[:, None].astype(">i4")]  # its first byte is below that of the end
    if routes is not None:  # a hash of each token's, as only what is equal has to come together
        experts = routes.reshape(len(ids), -1)
        factors = np.random.default_rng(0).integers(1, 2**62, experts.shape[1])
        parts.append((experts.astype(np.int64) @ factors)[:, None])
    return np.concatenate([part.view(np.uint8) for part in parts], axis=1).tobytes() + b"\xff"


def _common(one: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    """Return how many first entries two arrays have in common."""
    if not (n := min(len(one), len(other))):
        return 0
    apart = (one[:n] != other[:n]).reshape(n, -1).any(axis=1)
    return int(apart.argmax()) if apart.any() else n


def _arranged(
    order: Sequence[int], lengths: Sequence[int], common: Sequence[int], prompts: Sequence[int]
) -> TokenTree:
    """Return the tree of sorted samples: at each place where they part, the branch of the earliest position comes first.

    Args:
        order: positions of the samples, sorted by their tokens.
        lengths: tokens of each, without its last one.
        common: first tokens of each that the one before it has, too.
        prompts: of each.
    """
    found: list[tuple[int, int]] = []  # (index in order, tokens shared with the one before)
    # (samples [start, stop), where those around them have parted, tokens that the first shares with the one before it)
    todo = [(0, len(order), 0, 0)]
    while todo:
        start, stop, above, first_shares = todo.pop()
        if stop - start == 1:
            found.append((start, first_shares))
            continue
        parting = min(common[start + 1 : stop])
        cuts = [k for k in range(start + 1, stop) if common[k] == parting]
        branches = sorted(pairwise([start, *cuts, stop]), key=lambda b: min(order[b[0] : b[1]]))
        ends = [b for b in branches if b[1] - b[0] == 1 and lengths[b[0]] == parting]
        goes_on = [b for b in branches if b not in ends]
        saved = (parting - above) * (len(goes_on) - 1)
        place = above if len(goes_on) < 2 or (above and saved < _LEAST_SAVED) else parting
        first, *others = [(b, place) for b in goes_on] or [(b, parting) for b in ends[:1]]
        ended = [(b, parting) for b in ends if b != first[0]]
        todo += [(*b, place, shared) for b, shared in reversed([*ended, *others])]
        todo.append((*first[0], place, first_shares))
    kept = [k for k, _ in found]
    return TokenTree(
        tuple(lengths[k] for k in kept),
        tuple(shared for _, shared in found),
        tuple(prompts[k] for k in kept),
        tuple(order[k] for k in kept),
    )


def _cut(tree: TokenTree, max_tokens: int) -> list[TokenTree]:
    """Split a tree into parts of at most `max_tokens` tokens; a sample that is longer is alone."""
    cuts, room = [0], max_tokens - tree.lengths[0]
    for k, (shared, length) in enumerate(tree.spans[1:], start=1):
        if length - shared > room:
            cuts.append(k)
            room = max_tokens - length
        else:
            room -= length - shared
    return [tree.part(start, stop) for start, stop in pairwise([*cuts, len(tree.lengths)])]
