"""Chunked, vocabulary-parallel log-probs, entropies and sums of squared probabilities of response tokens.

The output layer is applied to a chunk of tokens at a time, and its logits are converted to float32 in still smaller
chunks. Under tensor parallelism each rank has a shard of the vocabulary, and three numbers a token are communicated: its
largest logit, then the sums over the vocabulary and the target's logit. Logits themselves are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from slime_models.cpu import product
from slime_models.triton_launch import can_launch
from torch import Tensor

from slime_megatron.batch.sampling_mask import NEVER, SamplingMask

#: Elements of logits that are held in float32 at once, by device: 64 MiB, but on a CPU what fits into its cache (8 MiB
#: took a third of the time of 64 MiB, measured with [2048, 49152] bfloat16 logits).
_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 24}


@dataclass(frozen=True)
class VocabularyShard:
    """Which ids a rank's columns of logits are."""

    size: int
    """Ids of the whole vocabulary; columns beyond are padding."""
    start: int = 0
    """Id of this rank's first column."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel group, whose ranks have the other columns; None where this rank has all."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocabulary: VocabularyShard | None = None,
    temperature: float = 1.0,
    sampling_mask: SamplingMask | None = None,
    with_entropy: bool = False,
    chunk_tokens: int = 4096,
) -> tuple[Tensor, Tensor | None]:
    """Return (log-prob of each target, entropy of each distribution or None), in nats, float32 [R].

    Collective over the vocabulary's group: all of its ranks get the same answer. The gradient of `hidden` is this rank's
    share, to be added up over the group.

    Args:
        hidden: [R, hidden_size], any floating dtype.
        weight: [columns, hidden_size] of the output layer, same dtype; logits are `hidden @ weight.t()`.
        targets: int64 [R].
        vocabulary: which ids the columns are; all of them, one by one, when None.
        temperature: divides the logits.
        sampling_mask: the ids that each distribution is over; all ids when None.
        with_entropy: whether to compute entropies.
        chunk_tokens: tokens whose logits are held at once. The backward pass computes those of all but the last chunk
            again; those of the last were kept, and become its gradient, so that no second backward pass is possible.
    """
    vocabulary = vocabulary or VocabularyShard(len(weight))
    log_probs, entropy = _TokenLogProbs.apply(
        hidden, weight, targets, vocabulary, temperature, sampling_mask, with_entropy, chunk_tokens
    )
    return log_probs, entropy if with_entropy else None


@torch.no_grad()
def sum_pi_squared(
    hidden: Tensor,
    weight: Tensor,
    *,
    vocabulary: VocabularyShard | None = None,
    temperature: float = 1.0,
    sampling_mask: SamplingMask | None = None,
    chunk_tokens: int = 4096,
) -> Tensor:
    """Return the sum over the vocabulary of squared probabilities, float32 [R].

    Collective over the vocabulary's group: all of its ranks get the same answer. Arguments are those of
    `token_log_probs`.
    """
    vocabulary = vocabulary or VocabularyShard(len(weight))
    peaks = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    sums = peaks.new_empty(2, len(hidden))  # of exp(z - peak), and of its square
    for rows in _slices(len(hidden), chunk_tokens):
        logits = product(hidden[rows], weight.t())
        for chunk, scaled in _chunks(logits, rows.start, vocabulary, temperature, sampling_mask):
            torch.amax(scaled, dim=-1, out=peaks[chunk])
            weights = scaled.sub_(peaks[chunk, None]).exp_()
            torch.sum(weights, dim=-1, out=sums[0, chunk])
            torch.sum(weights.square_(), dim=-1, out=sums[1, chunk])
    if vocabulary.group is not None:
        highest = peaks.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=vocabulary.group)
        share = (peaks - highest).exp_()
        sums.mul_(torch.stack([share, share.square()]))
        dist.all_reduce(sums, group=vocabulary.group)
    return sums[1] / sums[0].square()


class _TokenLogProbs(torch.autograd.Function):
    """Keeps log-normalisers and the last chunk's logits.

    With z = logits / T, lse = logsumexp(z), p = exp(z - lse) and H = lse - sum(p z):
    d logp_y / dz_j = [j = y] - p_j and dH / dz_j = -p_j (z_j - lse + H). Gradients of other ranks' logits need nothing
    of this rank's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: VocabularyShard,
        temperature: float,
        sampling_mask: SamplingMask | None,
        with_entropy: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        peaks = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        # Of each row: the target's logit, sum(exp(z - peak)), and sum(exp(z - peak) z) where entropies are wanted.
        sums = peaks.new_empty(3 if with_entropy else 2, len(hidden))
        columns, mine = _own_targets(targets, vocabulary, len(weight))
        memory = hidden.new_empty(min(chunk_tokens, len(hidden)), len(weight))
        for rows in _slices(len(hidden), chunk_tokens):
            logits = product(hidden[rows], weight.t(), out=memory[: rows.stop - rows.start])
            if sampling_mask is None and can_launch(logits.device):
                peaks[rows], sums[:, rows] = _sums_at_once(
                    logits, columns[rows], vocabulary, temperature, with_entropy=with_entropy
                )
                continue
            for chunk, scaled in _chunks(logits, rows.start, vocabulary, temperature, sampling_mask):
                sums[0, chunk] = scaled.gather(1, columns[chunk, None]).squeeze(1)
                torch.amax(scaled, dim=-1, out=peaks[chunk])
                peak = peaks[chunk, None]
                weights = (scaled - peak).exp_() if with_entropy else scaled.sub_(peak).exp_()
                torch.sum(weights, dim=-1, out=sums[1, chunk])
                if with_entropy:
                    torch.sum(weights.mul_(scaled), dim=-1, out=sums[2, chunk])
        if mine is not None:
            peaks = _sum_over_ranks(peaks, sums, mine, vocabulary)
        normalisers = peaks + sums[1].log()
        log_probs = sums[0] - normalisers
        entropy = normalisers - sums[2] / sums[1] if with_entropy else normalisers.new_empty(0)
        ctx.save_for_backward(hidden, weight, memory, columns, mine, normalisers, entropy)
        ctx.vocabulary, ctx.temperature, ctx.sampling_mask = vocabulary, temperature, sampling_mask
        ctx.with_entropy, ctx.chunk_tokens = with_entropy, chunk_tokens
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, d_log_probs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, memory, columns, mine, normalisers, entropy = ctx.saved_tensors
        hits = d_log_probs / ctx.temperature
        hits = hits if mine is None else hits * mine
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight: Tensor | None = None
        chunks = _slices(len(hidden), ctx.chunk_tokens)
        for rows in reversed(chunks):
            logits = memory[: rows.stop - rows.start]
            if rows is not chunks[-1]:
                product(hidden[rows], weight.t(), out=logits)
            _write_gradient(ctx, logits, rows, columns, normalisers, entropy, d_log_probs, d_entropy, hits)
            if d_hidden is not None:
                product(logits, weight, out=d_hidden[rows])
            if ctx.needs_input_grad[1]:
                part = product(logits.t(), hidden[rows])
                if len(chunks) == 1:
                    d_weight = part
                else:  # in float32: rounded once, however many chunks there are
                    d_weight = part.float() if d_weight is None else d_weight.add_(part)
        if not chunks and ctx.needs_input_grad[1]:
            # Not None: Megatron's hook refuses that where ranks add gradients up during the backward pass.
            d_weight = torch.zeros_like(weight)
        return d_hidden, None if d_weight is None else d_weight.to(weight), *[None] * 6


def _sums_at_once(
    logits: Tensor,
    columns: Tensor,
    vocabulary: VocabularyShard,
    temperature: float,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return the largest z of each row, and the sums of `_TokenLogProbs.forward`, by one kernel."""
    from slime_megatron.kernels import operators

    real = _real_columns(logits, vocabulary)
    peaks, sums = operators.vocabulary_sums(logits, columns.contiguous(), real, temperature, with_entropy)
    return peaks, sums


def _write_gradient(
    ctx: Any,
    logits: Tensor,
    rows: slice,
    columns: Tensor,
    normalisers: Tensor,
    entropy: Tensor,
    d_log_probs: Tensor,
    d_entropy: Tensor,
    hits: Tensor,
) -> None:
    """Write over logits, those of `rows`, the gradient that they have."""
    if ctx.sampling_mask is None and can_launch(logits.device):
        from slime_megatron.kernels import operators

        of_entropies = (
            (entropy[rows], -d_entropy[rows] / ctx.temperature) if ctx.with_entropy else (None, None)
        )
        operators.vocabulary_gradient(
            logits,
            columns[rows].contiguous(),
            normalisers[rows],
            -d_log_probs[rows] / ctx.temperature,
            hits[rows].contiguous(),
            *of_entropies,
            _real_columns(logits, ctx.vocabulary),
            ctx.temperature,
        )
        return
    for chunk, scaled in _chunks(logits, rows.start, ctx.vocabulary, ctx.temperature, ctx.sampling_mask):
        shifted = scaled.sub_(normalisers[chunk, None])
        outer = -d_log_probs[chunk, None] / ctx.temperature
        if ctx.with_entropy:
            probabilities = shifted.exp()
            shifted.add_(entropy[chunk, None]).mul_(-d_entropy[chunk, None] / ctx.temperature)
            gradient = shifted.add_(outer).mul_(probabilities)
        else:
            gradient = shifted.exp_().mul_(outer)
        gradient.scatter_add_(1, columns[chunk, None], hits[chunk, None])
        logits[chunk.start - rows.start : chunk.stop - rows.start] = gradient


def _real_columns(logits: Tensor, vocabulary: VocabularyShard) -> int:
    """Return how many columns are ids, from the first on."""
    return min(logits.shape[1], max(0, vocabulary.size - vocabulary.start))


def _own_targets(targets: Tensor, vocabulary: VocabularyShard, columns: int) -> tuple[Tensor, Tensor | None]:
    """Return the column of each target, and whether it is this rank's; None where there are no other ranks."""
    if vocabulary.group is None:
        return targets, None
    own = targets - vocabulary.start
    mine = (own >= 0) & (own < columns)
    return own.where(mine, 0), mine


def _sum_over_ranks(peaks: Tensor, sums: Tensor, mine: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Add `sums` up over all ranks' columns, in place, relative to the largest logit of all; return the latter."""
    highest = peaks.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=vocabulary.group)
    sums[0].mul_(mine)
    sums[1:].mul_((peaks - highest).exp_())
    dist.all_reduce(sums, group=vocabulary.group)
    return highest


def _slices(n: int, size: int) -> list[slice]:
    """Return slices that cover n: the last ones of `size`, the first of what is left."""
    return [slice(max(0, stop - size), stop) for stop in range(n, 0, -size)][::-1]


def _chunks(
    logits: Tensor,
    first: int,
    vocabulary: VocabularyShard,
    temperature: float,
    sampling_mask: SamplingMask | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows, and logits / temperature of those rows in float32, each time in the same memory.

    Args:
        logits: [rows, columns].
        first: number of their first row; rows are yielded from there on.
        vocabulary: which ids the columns are.
        temperature: divides the logits.
        sampling_mask: the ids that each row's distribution is over; all ids when None.
    """
    columns = logits.shape[1]
    step = min(len(logits), max(1, _CHUNK_ELEMENTS[logits.device.type] // columns))
    real = _real_columns(logits, vocabulary)
    buffer = torch.empty(step, columns, dtype=torch.float32, device=logits.device)
    for rows in _slices(len(logits), step):
        scaled = buffer[: rows.stop - rows.start].copy_(logits[rows])
        if temperature != 1.0:
            scaled.div_(temperature)
        if real < columns:
            scaled[:, real:] = NEVER
        if sampling_mask is not None:
            sampling_mask.mask_logits(scaled, first + rows.start, start=vocabulary.start)
        yield slice(first + rows.start, first + rows.stop), scaled
