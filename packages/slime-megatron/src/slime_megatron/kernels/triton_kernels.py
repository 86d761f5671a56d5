"""The kernels, in Triton's language: `operators` says what they are given.

Each computes in float32 what lies between a load and a store.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def rotate_kernel(
    x,
    cosine,
    sine,
    out,
    token_stride,
    head_stride,
    table_stride,
    n_heads,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Some heads of one token: `left` and `right` are what is rotated together."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    source = x + token * token_stride + head[:, None] * head_stride
    target = out + (token * n_heads + head[:, None]) * DIM
    at = tl.arange(0, HALF)
    is_there = (head < n_heads)[:, None] & (at < ROTATED // 2)[None, :]
    c = tl.load(cosine + token * table_stride + at, mask=at < ROTATED // 2, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sine + token * table_stride + at, mask=at < ROTATED // 2, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        s = -s
    if INTERLEAVED:
        first, second = (2 * at)[None, :], (2 * at + 1)[None, :]
    else:
        first, second = at[None, :], (at + ROTATED // 2)[None, :]
    left = tl.load(source + first, mask=is_there, other=0.0).to(tl.float32)
    right = tl.load(source + second, mask=is_there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(target + first, (left * c - right * s).to(kind), mask=is_there)
    tl.store(target + second, (right * c + left * s).to(kind), mask=is_there)
    if REST > 0:
        other = ROTATED + tl.arange(0, REST)
        is_other = (head < n_heads)[:, None] & (other < DIM)[None, :]
        tl.store(target + other[None, :], tl.load(source + other[None, :], mask=is_other), mask=is_other)


@triton.jit
def vocabulary_sums_kernel(
    logits,
    targets,
    peaks,
    sums,
    n_rows,
    row_stride,
    n_real,
    temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: each lane has the largest of its columns and sums relative to that, which are put together at the end."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + row * row_stride + column, mask=column < n_real, other=float("-inf"))
        z = z.to(tl.float32) / temperature
        now = tl.maximum(largest, z)
        base = tl.where(now == float("-inf"), 0.0, now)
        weight, shrunk = tl.exp(z - base), tl.exp(largest - base)
        total = total * shrunk + weight
        if WITH_ENTROPY:
            weighted = weighted * shrunk + tl.where(weight > 0.0, weight * z, 0.0)
        largest = now
    peak = tl.max(largest, 0)
    share = tl.exp(largest - peak)
    tl.store(peaks + row, peak)
    target = tl.load(logits + row * row_stride + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(sums + row, target)
    tl.store(sums + n_rows + row, tl.sum(total * share, 0))
    if WITH_ENTROPY:
        tl.store(sums + 2 * n_rows + row, tl.sum(weighted * share, 0))


@triton.jit
def vocabulary_gradient_kernel(
    logits,
    targets,
    normalisers,
    outer,
    hits,
    entropies,
    of_entropies,
    row_stride,
    n_columns,
    n_real,
    temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some columns of a row, whose logits become their gradient."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * row_stride + column
    shifted = tl.load(at, mask=column < n_real, other=float("-inf")).to(tl.float32) / temperature
    shifted = shifted - tl.load(normalisers + row)
    factor = tl.load(outer + row)
    probability = tl.exp(shifted)
    gradient = probability * factor
    if WITH_ENTROPY:
        more = (shifted + tl.load(entropies + row)) * tl.load(of_entropies + row) * probability
        gradient += tl.where(probability > 0.0, more, 0.0)
    gradient += tl.where(column == tl.load(targets + row), tl.load(hits + row), 0.0)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=column < n_columns)
