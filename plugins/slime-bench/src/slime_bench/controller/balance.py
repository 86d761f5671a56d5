"""Dividing ragged samples among ranks, ours beside verl's partitioner."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from slime_core.samples import TrainBatch
from slime_megatron.batch.rank_schedule import balance, rank_schedule

#: Most tokens of a sample, and of a micro-batch.
_LONGEST, MAX_TOKENS = 8192, 16384
_PROMPT = 16


@dataclass(frozen=True)
class Division:
    """How samples were divided among ranks."""

    name: str
    seconds: float
    """That the process was on its core; each way has one thread."""
    over_bound: float
    """Tokens of the rank with the most over the lower bound, less 1: the mean of all ranks, or the longest sample."""


def ragged_lengths(n: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return lengths of `n` responses as policies give them: lognormal, median 600 tokens, cut off at the limit."""
    drawn = np.random.default_rng(seed).lognormal(np.log(600), 1.0, n)
    return np.clip(drawn, 1, _LONGEST - _PROMPT).astype(np.int64)


def divisions(n_samples: int, n_ranks: int) -> list[Division]:
    """Divide the same ragged samples by each way, in turn.

    Ours are the whole schedule of an optimizer step (micro-batches, as many for each rank), and its balancing alone, given the
    samples themselves; verl's is there if it is installed.
    """
    gc.freeze()  # as a run does when it has started
    lengths = ragged_lengths(n_samples) + _PROMPT
    batch, total = _batch(lengths), lengths.tolist()
    even = total[: n_samples // n_ranks * n_ranks]

    def scheduled() -> list[list[int]]:
        ranks = rank_schedule(
            batch,
            range(n_samples),
            n_ranks=n_ranks,
            max_tokens=MAX_TOKENS,
            share=False,
            cost=lambda tree: tree.n_tokens,
        )
        return [
            [i for micro in rank if micro.counted for tree in micro.trees for i in tree.members]
            for rank in ranks
        ]

    found = [
        _divided("slime: schedule of micro-batches", scheduled, total, n_ranks),
        _divided("slime: samples, as many for each rank", lambda: balance(even, n_ranks), even, n_ranks),
    ]
    theirs = _verl()
    if theirs is not None:
        for equal in (True, False):
            of = even if equal else total
            name = f"verl: samples{', as many for each rank' if equal else ''}"
            found.append(_divided(name, lambda of=of, equal=equal: theirs(of, n_ranks, equal), of, n_ranks))  # type: ignore[misc]  # bound at once
    return found


def _divided(
    name: str, divide: Callable[[], list[list[int]]], lengths: Sequence[int], n_ranks: int
) -> Division:
    begin = time.process_time()
    ranks = divide()
    seconds = time.process_time() - begin
    assert sorted(i for rank in ranks for i in rank) == list(range(len(lengths)))
    bound = max(sum(lengths) / n_ranks, max(lengths))
    return Division(name, seconds, max(sum(lengths[i] for i in rank) for rank in ranks) / bound - 1)


def _verl() -> Callable[[list[int], int, bool], list[list[int]]] | None:
    """Return verl's partitioner; None where verl is not installed."""
    try:
        module = importlib.import_module("verl.utils.seqlen_balancing")
    except ImportError:
        return None
    return module.get_seqlen_balanced_partitions  # type: ignore[no-any-return]  # its signature is known


def _batch(lengths: NDArray[np.int64]) -> TrainBatch:
    """Return a batch of samples of these lengths, the tokens all 0."""
    n, offsets = len(lengths), np.concatenate([[0], np.cumsum(lengths)])
    response_offsets = offsets - _PROMPT * np.arange(n + 1)
    column, numbers = np.zeros(int(response_offsets[-1]), dtype=np.float32), np.arange(n)
    return TrainBatch(
        step=1,
        tokens=np.zeros(int(offsets[-1]), dtype=np.int32),
        offsets=offsets,
        response_offsets=response_offsets,
        loss_mask=column,
        rollout_log_probs=column,
        teacher_log_probs=None,
        rewards=np.zeros(n, dtype=np.float32),
        raw_rewards=np.zeros(n, dtype=np.float32),
        sample_ids=numbers,
        group_ids=numbers,
        rollout_ids=numbers,
        truncated=np.zeros(n, dtype=np.bool_),
        optimizer_steps=(numbers,),
        weights=column,
        temperature=1.0,
    )
