"""What passes over all bytes of weights in host memory, as numba compiles it: the sums of `fingerprint`, and copies.

Both go at the rate at which memory is read and written. Everything that is compiled stands in this one file: numba looks at a
function's own file, and at no other, to tell whether what it keeps on the disk is still good.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_I64 = types.int64
_WORDS = 512
_ROW_BYTES = 8 * _WORDS
#: Words that are stored at once, at a multiple of their size.
_VECTOR = ir.VectorType(ir.IntType(64), 4)
_VECTOR_BYTES = 32


@intrinsic
def _move(typing, target, source):
    """Copy 32 bytes past the caches, to an address that is a multiple of 32."""

    def emit(context, builder, signature, args):
        to, at = (builder.inttoptr(address, _VECTOR.as_pointer()) for address in args)
        stored = builder.store(builder.load(at, align=1), to, align=_VECTOR_BYTES)
        once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        stored.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    return types.void(_I64, _I64), emit


@intrinsic
def _fence(typing):
    """Have what was stored past the caches be there before anything that is stored later."""

    def emit(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _move_byte(typing, target, source):
    """Copy a byte."""

    def emit(context, builder, signature, args):
        to, at = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args)
        builder.store(builder.load(at), to)
        return context.get_dummy_value()

    return types.void(_I64, _I64), emit


def make_copy(*, cache: bool):
    """Compile a copy of `n_bytes` from the address `source` to `target`.

    It does not read what it overwrites, as other copies do; what was copied is in no cache.
    """

    @njit(types.void(_I64, _I64, _I64), nogil=True, cache=cache)
    def copy(target, source, n_bytes):
        begin = min(-target % _VECTOR_BYTES, n_bytes)
        end = begin + (n_bytes - begin) // _VECTOR_BYTES * _VECTOR_BYTES
        for at in range(begin):
            _move_byte(target + at, source + at)
        for at in range(begin, end, _VECTOR_BYTES):
            _move(target + at, source + at)
        for at in range(end, n_bytes):
            _move_byte(target + at, source + at)
        _fence()

    return copy


def make_sum_words(*, cache: bool):
    """Compile `fingerprint._sum_words`, which may copy what it sums, so that each byte is read once for both.

    Where `target` is not 0, a multiple of 32, each row is copied there once it is summed, past the caches, and so is what comes after
    the last whole word of the `n_bytes` at `source`; `words` are those at `source`.
    """

    @njit(_I64(_I64, _I64, _I64, _I64[::1], _I64, _I64[::1], _I64[::1]), nogil=True, cache=cache)
    def sum_words(target, source, n_bytes, words, first_row, word_weights, row_weights):
        n_rows = len(words) // _WORDS
        total = np.int64(0)
        for row in range(n_rows):
            part = np.int64(0)
            for at in range(_WORDS):  # of fixed length, so that it is vectorised
                word = words[row * _WORDS + at]
                part += (word + (word >> 32)) * word_weights[at]
            total += part * row_weights[first_row + row]
            if target:
                for at in range(row * _ROW_BYTES, (row + 1) * _ROW_BYTES, _VECTOR_BYTES):
                    _move(target + at, source + at)
        part = np.int64(0)
        for at in range(len(words) - n_rows * _WORDS):
            word = words[n_rows * _WORDS + at]
            part += (word + (word >> 32)) * word_weights[at]
        if len(words) > n_rows * _WORDS:
            total += part * row_weights[first_row + n_rows]
        if target:
            for at in range(n_rows * _ROW_BYTES, n_bytes):
                _move_byte(target + at, source + at)
            _fence()
        return total

    return sum_words
