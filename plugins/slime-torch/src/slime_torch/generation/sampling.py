"""Drawing the next token of many requests at once, reproducibly, and the exact log-prob of what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from slime_core.protocols import SamplingParams
from slime_models.triton_launch import can_launch
from slime_models.upload import upload
from torch import Tensor

#: Width of the blocks in which a row of unnormalised probabilities is summed before the draw is looked up.
_BLOCK = 256
#: How many numbers are gone through at a time on a CPU: few enough to stay in its cache.
_CACHED = 2**19
#: Numbers of a row's largest logits in which the top-p cutoff is looked for, before all logits are sorted.
_CANDIDATES = (64, 1024)


@dataclass(frozen=True)
class Draws:
    """What the next tokens of requests depend on besides their logits: arrays [n], so that no step goes over requests one by one."""

    temperatures: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]
    """Index of the token in the sequence, prompt included."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> Draws:
        """Return those of requests with these parameters, seeds (any integers, taken modulo 2**64) and positions."""
        return cls(
            np.array([each.temperature for each in params], np.float32),
            np.array([each.top_k for each in params], np.int64),
            np.array([each.top_p for each in params], np.float64),
            np.array([seed & (2**64 - 1) for seed in seeds], np.uint64),
            np.array(positions, np.int64),
        )

    def at(self, positions: NDArray[np.int64]) -> Draws:
        """Return those of the same requests at other positions."""
        return replace(self, positions=positions)

    @property
    def is_greedy(self) -> NDArray[np.bool_]:
        """Which take the likeliest token."""
        greedy: NDArray[np.bool_] = self.temperatures == 0
        return greedy

    def limited_by_k(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which are drawn from fewer than all ids by top-k."""
        return ~self.is_greedy & (self.top_k > 0) & (self.top_k < vocab_size)

    @property
    def points(self) -> NDArray[np.float64]:
        """A number in [0, 1) for each."""
        return uniform(self.seeds, self.positions)

    @property
    def limited_by_p(self) -> NDArray[np.bool_]:
        """Which are drawn from fewer than all ids by top-p."""
        return ~self.is_greedy & (self.top_p < 1)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position); it depends on nothing else.

    Source: the finaliser of splitmix64 (Steele, Lea and Flood, 2014), applied to the seed and then to its sum
    with a multiple of the position; the upper 53 bits are used.
    """
    with np.errstate(over="ignore"):
        state = _mixed(_mixed(seeds) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


#: Of a token: the ids that top-k and top-p kept, ascending int32; None where the whole vocabulary was kept.
SamplingMask = NDArray[np.int32] | None


def sample(
    logits: Tensor, draws: Draws, *, with_sampling_masks: bool = False
) -> tuple[list[int], list[float], list[SamplingMask]]:
    """Draw a token a row by inverting the cumulative distribution.

    The distribution is the softmax of logits / temperature, over what top-k keeps and then top-p of that; tokens
    that tie with the last one kept are kept too. Temperature 0 takes the likeliest token (the first of equals),
    and its log-prob is that of the untempered softmax over everything.

    Args:
        logits: [n, vocab_size], any floating dtype; not changed.
        draws: of n requests.
        with_sampling_masks: whether to return the ids that top-k and top-p kept.

    Returns:
        (tokens, natural log-probs in float32 precision, sampling masks; None for each row where they are not wanted).
    """
    temperatures = np.where(draws.is_greedy, np.float32(1), draws.temperatures)
    if (temperatures != 1).any():
        logits = logits.float() / upload(temperatures, logits.device)[:, None]
    logits = _restricted(logits, draws)
    drawn = draw(logits, upload(draws.is_greedy, logits.device), upload(draws.points, logits.device))
    sampling_masks: list[SamplingMask] = [None] * len(logits)
    if with_sampling_masks:
        sampling_masks = _sampling_masks(logits, draws)
    return *fetched(drawn), sampling_masks


def draw(logits: Tensor, greedy: Tensor, points: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Return float64 [2, n]: a token a row, and its log-prob. The host need not wait, and no shape depends on values.

    Args:
        logits: [n, vocab_size], -inf where a token is not to be drawn.
        greedy: bool [n], which rows take the likeliest token.
        points: float64 [n], in [0, 1).
        temperatures: float32 [n], positive, which logits are divided by; 1 where not given.
    """
    maxima, sums = _per_block(logits, temperatures)
    peaks, ends = maxima.amax(-1, keepdim=True), sums.double().cumsum(-1)
    targets = points[:, None] * ends[:, -1:]
    block = torch.where(greedy, maxima.argmax(-1), torch.searchsorted(ends, targets, right=True).squeeze(1))
    inside = _block(logits, block)
    if temperatures is not None:
        inside /= temperatures[:, None]
    begins = torch.nn.functional.pad(ends, (1, 0))
    rest = targets - begins.gather(1, block[:, None])
    index = torch.where(greedy, inside.argmax(-1), _inverted((inside - peaks).exp(), rest))
    chosen = inside.gather(1, index[:, None])
    log_probs = (chosen - peaks.double() - ends[:, -1:].log()).squeeze(1)
    return torch.stack([(block * _BLOCK + index).double(), log_probs])


def fetched(drawn: Tensor) -> tuple[list[int], list[float]]:
    """Return what `draw` returned, on the host, which waits for it once."""
    ids, values = drawn.tolist()
    return [int(token) for token in ids], values


def _sampling_masks(logits: Tensor, draws: Draws) -> list[SamplingMask]:
    held = np.flatnonzero(draws.limited_by_k(logits.shape[1]) | draws.limited_by_p)
    masks: list[SamplingMask] = [None] * len(logits)
    if len(held):
        rows = logits.index_select(0, upload(held, logits.device))
        row, ids = rows.isfinite().nonzero().to(torch.int32).cpu().numpy().T
        ends = np.searchsorted(row, np.arange(1, len(held)))
        for i, kept in zip(held.tolist(), np.split(ids, ends), strict=True):
            masks[i] = kept.copy()  # without holding on to those of all rows
    return masks


def _per_block(logits: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the largest tempered logit of each block and its sum of exp(logit - the row's largest): float32 [n, blocks] each.

    Not torch.softmax: summing a row of 50,000 in float32 shifts every log-prob by some 1e-5. Blocks do not.
    """
    n, vocab = logits.shape
    if can_launch(logits.device):
        from slime_torch.kernels.triton_operators import block_sums

        ones = logits.new_ones(n, dtype=torch.float32)
        maxima, sums = block_sums(logits.contiguous(), ones if temperatures is None else temperatures, _BLOCK)
        return maxima, sums.mul_((maxima - maxima.amax(-1, keepdim=True)).exp_())
    blocks = -(-vocab // _BLOCK)
    maxima, sums = torch.empty(2, n, blocks, device=logits.device)
    step = max(1, _CACHED // (blocks * _BLOCK)) if logits.device.type == "cpu" else n
    scratch = torch.empty(min(step, n), blocks * _BLOCK, device=logits.device)
    parts = (torch.split(tensor, step) for tensor in (logits, maxima, sums))
    divisors = None if temperatures is None else iter(torch.split(temperatures, step))
    for rows, largest, total in zip(*parts, strict=True):
        weights = scratch[: len(rows)]
        weights[:, :vocab] = rows
        if divisors is not None:
            weights[:, :vocab] /= next(divisors)[:, None]
        if vocab % _BLOCK:
            weights[:, vocab:] = -torch.inf
        in_blocks = weights.view(-1, blocks, _BLOCK)
        torch.amax(in_blocks, -1, out=largest)
        weights.sub_(largest.amax(-1, keepdim=True)).exp_()
        torch.sum(in_blocks, -1, out=total)
    return maxima, sums


def _block(logits: Tensor, block: Tensor) -> Tensor:
    """Return of each row the block `block` [n], float32 [n, _BLOCK], -inf where the vocabulary has ended."""
    ids = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    last = logits.shape[1] - 1
    return logits.gather(1, ids.clamp_max(last)).float().masked_fill_(ids > last, -torch.inf)


def _inverted(weights: Tensor, rest: Tensor) -> Tensor:
    """Return the first index at which each row's cumulative sum exceeds `rest`.

    Args:
        weights: float32 [n, _BLOCK], unnormalised probabilities.
        rest: float64 [n, 1], less than a row's sum but for rounding.
    """
    cumulative = weights.double().cumsum(-1)
    # The sum that `rest` comes from was rounded to float32: stay below what the elements add up to.
    rest = torch.minimum(rest, cumulative[:, -1:] * (1 - 2.0**-52))
    # Where weights are no numbers there is no such index: the log-prob tells, and here none may be read that is not there.
    return torch.searchsorted(cumulative, rest, right=True).squeeze(1).clamp_max_(weights.shape[1] - 1)


def _restricted(logits: Tensor, draws: Draws) -> Tensor:
    """Return the logits with -inf where top-k or top-p drop a token; the same tensor if nobody asks for it."""
    by_k, by_p = np.flatnonzero(draws.limited_by_k(logits.shape[1])), np.flatnonzero(draws.limited_by_p)
    if not len(by_k) and not len(by_p):
        return logits
    logits = logits.float()
    edges = logits.new_full((len(logits), 1), -torch.inf)
    if len(by_k):
        rows, ks = upload(by_k, logits.device), draws.top_k[by_k]
        largest = logits[rows].topk(int(ks.max()), dim=-1).values
        edges[rows] = largest.gather(1, upload(ks[:, None] - 1, logits.device))
    if len(by_p):
        rows, tops = upload(by_p, logits.device), upload(draws.top_p[by_p], logits.device)
        kept = _at_least(logits[rows], edges[rows])
        edges[rows] = torch.maximum(edges[rows], _top_p_edge(kept, tops))
    return _at_least(logits, edges)


def _at_least(rows: Tensor, edges: Tensor) -> Tensor:
    return rows.masked_fill(rows < edges, -torch.inf)


def _top_p_edge(rows: Tensor, top_p: Tensor) -> Tensor:
    """Return the last logit [n, 1] that each row needs, from the largest down, to reach its `top_p`."""
    n, vocab = rows.shape
    peaks = rows.amax(-1, keepdim=True)
    wanted = top_p * (rows - peaks).exp().sum(-1, dtype=torch.float64)
    edges = rows.new_full((n, 1), -torch.inf)
    left = torch.arange(n, device=rows.device)
    for width in (*(c for c in _CANDIDATES if c < vocab), vocab):
        largest = rows[left].topk(width, dim=-1).values
        mass = (largest - peaks[left]).exp().double().cumsum(-1)
        needed = (mass < wanted[left, None]).sum(-1)  # index of the one that reaches it
        found = (needed < width)[:, None]
        edge = largest.gather(1, needed[:, None].clamp_max(width - 1))
        edges[left] = edge.masked_fill_(~found, -torch.inf)
        if width < vocab:
            left = left[(~found[:, 0]).nonzero().squeeze(1)]  # the host waits for their number
        if len(left) == 0:
            break
    return edges  # a row that misses `wanted` by rounding keeps everything
