"""Log-probs, entropies and sums of squared probabilities of response tokens from logits, in float32, without a
float32 copy of all logits.

Under tensor parallelism each rank has the logits of its part of the vocabulary. Three numbers a token go between the
ranks: its largest logit, then the sums over the vocabulary and the target's logit; the logits themselves stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Elements of logits that are held in float32 at once, by device: 64 MiB, but on a CPU what fits into its cache (8 MiB
#: took a third of the time of 64 MiB, measured with [2048, 49152] bfloat16 logits).
_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 24}
#: Logit of an id that is none: its probability is 0, and unlike infinity it can be multiplied by 0.
_NEVER = -1e30


@dataclass(frozen=True)
class Vocabulary:
    """Which ids a rank's columns of logits stand for."""

    size: int
    """Ids; columns beyond are padding, and no tokens."""
    start: int = 0
    """Id of this rank's first column."""
    group: dist.ProcessGroup | None = None
    """The ranks that have the other columns; None where there are none."""


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: Vocabulary | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return (log-prob of each target, entropy of each distribution or None), in nats, float32 [R].

    Collective over the vocabulary's group: all of its ranks get the same answer.

    Args:
        logits: [R, columns], any floating dtype; kept for the backward pass, which overwrites them with their gradient,
            so that nothing else may need them, and no second backward pass is possible.
        targets: int64 [R].
        vocabulary: which ids the columns are; all of them, one by one, when None.
        temperature: divides the logits.
        with_entropy: whether to compute entropies.
    """
    vocabulary = vocabulary or Vocabulary(logits.shape[1])
    log_probs, entropy = _TokenLogProbs.apply(logits, targets, vocabulary, temperature, with_entropy)
    return log_probs, entropy if with_entropy else None


@torch.no_grad()
def sum_pi_squared(logits: Tensor, *, vocabulary: Vocabulary, temperature: float = 1.0) -> Tensor:
    """Return the sum over the vocabulary of squared probabilities, float32 [R]; `logits` stay as they are.

    Collective over the vocabulary's group: all of its ranks get the same answer. Arguments are those of
    `token_log_probs`.
    """
    peaks = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    sums = peaks.new_empty(2, len(logits))  # of exp(z - peak), and of its square
    for rows, scaled in _chunks(logits, vocabulary, temperature):
        torch.amax(scaled, dim=-1, out=peaks[rows])
        weights = scaled.sub_(peaks[rows, None]).exp_()
        torch.sum(weights, dim=-1, out=sums[0, rows])
        torch.sum(weights.square_(), dim=-1, out=sums[1, rows])
    if vocabulary.group is not None:
        highest = peaks.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=vocabulary.group)
        share = (peaks - highest).exp_()
        sums.mul_(torch.stack([share, share.square()]))
        dist.all_reduce(sums, group=vocabulary.group)
    return sums[1] / sums[0].square()


class _TokenLogProbs(torch.autograd.Function):
    """Keeps logits and log-normalisers, and computes probabilities again, a chunk of rows at a time.

    With z = logits / T, lse = logsumexp(z), p = exp(z - lse) and H = lse - sum(p z):
    d logp_y / dz_j = [j = y] - p_j and dH / dz_j = -p_j (z_j - lse + H). Gradients of other ranks' logits need nothing
    of this rank's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocabulary: Vocabulary,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = logits.shape[0]
        peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
        # Of each row: the target's logit, sum(exp(z - peak)), and sum(exp(z - peak) z) where entropies are wanted.
        sums = peaks.new_empty(3 if with_entropy else 2, rows)
        columns, mine = _own_targets(targets, vocabulary, logits.shape[1])
        for chunk, scaled in _chunks(logits, vocabulary, temperature):
            sums[0, chunk] = scaled.gather(1, columns[chunk, None]).squeeze(1)
            torch.amax(scaled, dim=-1, out=peaks[chunk])
            peak = peaks[chunk, None]
            weights = (scaled - peak).exp_() if with_entropy else scaled.sub_(peak).exp_()
            torch.sum(weights, dim=-1, out=sums[1, chunk])
            if with_entropy:
                torch.sum(weights.mul_(scaled), dim=-1, out=sums[2, chunk])
        if mine is not None:
            peaks = _add_up(peaks, sums, mine, vocabulary)
        normalisers = peaks + sums[1].log()
        log_probs = sums[0] - normalisers
        entropy = normalisers - sums[2] / sums[1] if with_entropy else normalisers.new_empty(0)
        ctx.save_for_backward(logits, columns, mine, normalisers, entropy)
        ctx.vocabulary, ctx.temperature, ctx.with_entropy = vocabulary, temperature, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, d_log_probs: Tensor, d_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, columns, mine, normalisers, entropy = ctx.saved_tensors
        hits = d_log_probs / ctx.temperature
        hits = hits if mine is None else hits * mine
        for rows, scaled in _chunks(logits, ctx.vocabulary, ctx.temperature):
            shifted = scaled.sub_(normalisers[rows, None])
            outer = -d_log_probs[rows, None] / ctx.temperature
            if ctx.with_entropy:
                probabilities = shifted.exp()
                shifted.add_(entropy[rows, None]).mul_(-d_entropy[rows, None] / ctx.temperature).add_(outer)
                chunk = shifted.mul_(probabilities)
            else:
                chunk = shifted.exp_().mul_(outer)
            chunk.scatter_add_(1, columns[rows, None], hits[rows, None])
            logits[rows] = chunk
        return logits, None, None, None, None


def _own_targets(targets: Tensor, vocabulary: Vocabulary, columns: int) -> tuple[Tensor, Tensor | None]:
    """Return the column of each target, and whether it is this rank's; None where there are no other ranks."""
    if vocabulary.group is None:
        return targets, None
    own = targets - vocabulary.start
    mine = (own >= 0) & (own < columns)
    return own.where(mine, 0), mine


def _add_up(peaks: Tensor, sums: Tensor, mine: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Add `sums` up over all ranks' columns, in place, relative to the largest logit of all; return the latter."""
    highest = peaks.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=vocabulary.group)
    sums[0].mul_(mine)
    sums[1:].mul_((peaks - highest).exp_())
    dist.all_reduce(sums, group=vocabulary.group)
    return highest


def _chunks(logits: Tensor, vocabulary: Vocabulary, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows, and logits / temperature of those rows in float32, each time in the same memory."""
    columns = logits.shape[1]
    step = max(1, _CHUNK_ELEMENTS[logits.device.type] // columns)
    real = min(columns, max(0, vocabulary.size - vocabulary.start))
    buffer = torch.empty(step, columns, dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), step):
        rows = slice(start, min(start + step, len(logits)))
        scaled = buffer[: rows.stop - start].copy_(logits[rows])
        if temperature != 1.0:
            scaled.div_(temperature)
        if real < columns:
            scaled[:, real:] = _NEVER
        yield rows, scaled
