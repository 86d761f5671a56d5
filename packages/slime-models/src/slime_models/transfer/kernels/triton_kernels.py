"""The sums of `fingerprint` on a GPU by a kernel of Triton, which reads each byte once: where `triton_launch.can_launch`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

#: Rows that a program sums.
_ROWS = 8


@triton.jit
def row_sums_kernel(words, word_weights, sums, n_rows, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Some rows of words."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, WORDS)
    inside = rows < n_rows
    word = tl.load(words + rows[:, None] * WORDS + places[None, :], mask=inside[:, None], other=0)
    weighted = (word + (word >> 32)) * tl.load(word_weights + places)[None, :]
    tl.store(sums + rows, tl.sum(weighted, axis=1), mask=inside)


@torch.library.custom_op("slime_models::row_sums", mutates_args=())
def row_sums(words: Tensor, word_weights: Tensor) -> Tensor:
    """Return the weighted sum of each row, [rows] int64, of words [rows, words of a row] int64; both contiguous."""
    n_rows, n_words = words.shape
    sums = words.new_empty(n_rows)
    if n_rows:
        with torch.cuda.device_of(words):  # Triton launches on the current GPU
            row_sums_kernel[(triton.cdiv(n_rows, _ROWS),)](
                words, word_weights, sums, n_rows, ROWS=_ROWS, WORDS=n_words, num_warps=4
            )
    return sums


@row_sums.register_fake
def _(words: Tensor, word_weights: Tensor) -> Tensor:
    return words.new_empty(len(words))
