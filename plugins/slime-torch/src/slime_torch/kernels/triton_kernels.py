"""The kernels, in Triton's language: `triton_operators` says what they are given.

Each computes in float32 what lies between a load and a store.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def place_kernel(
    heads,
    cosine,
    sine,
    query_norm,
    key_norm,
    cache,
    positions,
    page,
    inside,
    n_pages,
    epsilon,
    QUERIES: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_LEN: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """One head of one token: its halves `x` and `y` are what is rotated together."""
    token, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, HALF)
    is_there = at < DIM // 2
    row = heads + (token.to(tl.int64) * (QUERIES + 2 * GROUPS) + head) * DIM
    x = tl.load(row + at, mask=is_there, other=0.0).to(tl.float32)
    y = tl.load(row + DIM // 2 + at, mask=is_there, other=0.0).to(tl.float32)
    kind = heads.dtype.element_ty
    if head < QUERIES + GROUPS:
        if HAS_NORMS:
            scale = tl.rsqrt((tl.sum(x * x) + tl.sum(y * y)) / DIM + epsilon)
            weight = key_norm
            if head < QUERIES:
                weight = query_norm
            x = (x * scale * tl.load(weight + at, mask=is_there, other=0.0)).to(kind).to(tl.float32)
            y = (
                (y * scale * tl.load(weight + DIM // 2 + at, mask=is_there, other=0.0))
                .to(kind)
                .to(tl.float32)
            )
        angle = tl.load(positions + token) * DIM + at
        turned = x * tl.load(cosine + angle, mask=is_there, other=0.0).to(tl.float32)
        turned += y * tl.load(sine + angle, mask=is_there, other=0.0).to(tl.float32)
        angle += DIM // 2
        y = y * tl.load(cosine + angle, mask=is_there, other=0.0).to(tl.float32)
        y += x * tl.load(sine + angle, mask=is_there, other=0.0).to(tl.float32)
        x = turned
        tl.store(row + at, x.to(kind), mask=is_there)
        tl.store(row + DIM // 2 + at, y.to(kind), mask=is_there)
    if head >= QUERIES:
        plane, group = (head - QUERIES) // GROUPS, (head - QUERIES) % GROUPS
        stored = plane.to(tl.int64) * n_pages + tl.load(page + token)
        stored = cache + ((stored * GROUPS + group) * PAGE_LEN + tl.load(inside + token)) * DIM
        tl.store(stored + at, x.to(kind), mask=is_there)
        tl.store(stored + DIM // 2 + at, y.to(kind), mask=is_there)


@triton.jit
def attend_kernel(
    heads,
    cache,
    out,
    parts,
    part_sums,
    positions,
    pages,
    sinks,
    n_pages,
    pages_stride,
    scale,
    QUERIES: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_LEN: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The queries of one token that share keys, and one part of these keys. Scores are in powers of two, as `scale` makes them."""
    slot, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_rows = QUERIES // GROUPS
    rows, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    held = tl.load(positions + slot).to(tl.int32) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(held - WINDOW, 0)
    size = tl.cdiv(tl.cdiv(held - first, SPLITS), KEYS) * KEYS
    begin = first + split * size
    end = tl.minimum(held, begin + size)
    head = slot.to(tl.int64) * (QUERIES + 2 * GROUPS) + group * n_rows + rows
    is_query = (rows < n_rows)[:, None] & (at < DIM)[None, :]
    query = tl.load(heads + head[:, None] * DIM + at[None, :], mask=is_query, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + group * n_rows + rows, mask=rows < n_rows, other=0.0).to(tl.float32)
        largest = tl.where(split == 0, sink * 1.4426950408889634, largest)
        total = tl.where(split == 0, total + 1.0, total)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    table = pages + slot.to(tl.int64) * pages_stride
    values = n_pages.to(tl.int64) * GROUPS * PAGE_LEN * DIM
    for start in range(begin, end, KEYS):
        token = start + tl.arange(0, KEYS)
        is_held = token < end
        page = tl.load(table + token // PAGE_LEN, mask=is_held, other=0)
        lies = ((page * GROUPS + group) * PAGE_LEN + token % PAGE_LEN) * DIM
        key = tl.load(
            cache + lies[None, :] + at[:, None], mask=is_held[None, :] & (at < DIM)[:, None], other=0.0
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale
        scores = tl.where(is_held[None, :], scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        shrunk = tl.exp2(largest - now)
        total = total * shrunk + tl.sum(weights, 1)
        is_value = is_held[:, None] & (at < DIM)[None, :]
        value = tl.load(cache + values + lies[:, None] + at[None, :], mask=is_value, other=0.0)
        sums = sums * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = now
    attended = sums / tl.where(total > 0, total, 1.0)[:, None]
    row = slot.to(tl.int64) * QUERIES + group * n_rows + rows
    if SPLITS == 1:
        tl.store(out + row[:, None] * DIM + at[None, :], attended.to(out.dtype.element_ty), mask=is_query)
    else:
        part = row * SPLITS + split
        tl.store(parts + part[:, None] * DIM + at[None, :], attended, mask=is_query)
        tl.store(part_sums + part, largest + tl.log2(total), mask=rows < n_rows)


@triton.jit
def combine_kernel(parts, part_sums, out, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """One head of one token: the mean of its parts, weighted by the sums of their weights."""
    row = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    sums = tl.load(part_sums + row * SPLITS + split)
    weights = tl.exp2(sums - tl.max(sums, 0))
    part = parts + (row * SPLITS + split)[:, None] * DIM + at[None, :]
    values = tl.load(part, mask=(at < DIM)[None, :], other=0.0)
    mean = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * DIM + at, mean.to(out.dtype.element_ty), mask=at < DIM)


@triton.jit
def block_sums_kernel(
    logits, temperatures, maxima, sums, n_columns, n_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Some blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tempered = tl.load(logits + row * n_columns + at, mask=at < n_columns, other=float("-inf")).to(tl.float32)
    tempered = tempered / tl.load(temperatures + row)
    largest = tl.max(tempered, 1)
    weights = tl.exp(tempered - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    is_there = block < n_blocks
    tl.store(maxima + row * n_blocks + block, largest, mask=is_there)
    tl.store(sums + row * n_blocks + block, tl.sum(weights, 1), mask=is_there)
