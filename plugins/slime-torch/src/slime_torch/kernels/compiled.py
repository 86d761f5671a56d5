"""The kernels, as numba compiles them: a row norm, rotary embedding with the cache's writes, attention of single queries.

A kernel is a C function of one address, that of its *block*: int64 words, of which the first counts the pieces of work that were
taken. Each thread of a team calls it with the same block, and takes pieces until none is left (`take`). What is computed for a row
depends on nothing but that row, so neither on who takes it nor on the rows beside it.

All addresses are of contiguous memory, of elements of `itemsize` bytes: bfloat16 (2), seen as uint16, or float32 (4). Sums and what
lies between a load and a store are float32. Everything that is compiled stands in this one file: numba looks at a kernel's own file,
and at no other, to tell whether what it keeps on disk is still good.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES = ir.IntType(8).as_pointer()
#: Rounding is free to differ from the order of the source, as in any vectorised sum; infinities and NaN are kept.
_FAST = {"reassoc", "contract", "nsz"}
_SIGNATURE, _W = types.void(types.voidptr), types.int64
_KINDS = {2: np.uint16, 4: np.float32}
#: Bytes of a cache line, and positions of the next keys or values that are fetched early.
_CACHE_LINE, _AHEAD = 64, 64

# Of `_exp`: x = n log 2 + r, and a polynomial for exp(r). Source: Cephes, expf.c (Moshier); relative error below 2e-7.
_F = np.float32
_ZERO, _HALF, _ONE = _F(0), _F(0.5), _F(1)
_LOWEST, _LOG2_E, _LOG_2_HIGH, _LOG_2_LOW = _F(-87), _F(1.44269504), _F(0.693359375), _F(-2.12194440e-4)
_P0, _P1, _P2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_P3, _P4, _P5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)


@intrinsic
def _take(typing, block):
    """Return which piece of work is next: the block's first word, which is counted up for all threads at once."""

    def emit(context, builder, signature, args):
        counter = builder.bitcast(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.voidptr), emit


@intrinsic
def _pointer(typing, address):
    """Return an int64 as an address."""
    return types.voidptr(types.int64), lambda context, builder, signature, args: builder.inttoptr(
        args[0], _BYTES
    )


@intrinsic
def _wide(typing, element):
    """Return an element, bfloat16 as uint16 or float32, as float32."""
    if element == types.float32:
        return types.float32(element), lambda context, builder, signature, args: args[0]

    def emit(context, builder, signature, args):
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _FLOAT)

    return types.float32(types.uint16), emit


@intrinsic
def _narrow(typing, value, like):
    """Return a float32 as an element of the type of `like`; bfloat16 is rounded to nearest, ties to even."""
    if like == types.float32:
        return types.float32(types.float32, like), lambda context, builder, signature, args: args[0]

    def emit(context, builder, signature, args):
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        rounded = builder.lshr(_rounded(builder, args[0], _I32), ir.Constant(_I32, 16))
        return builder.trunc(builder.select(is_nan, ir.Constant(_I32, 0x7FC0), rounded), ir.IntType(16))

    return types.uint16(types.float32, types.uint16), emit


@intrinsic
def _power_of_two(typing, exponent):
    """Return 2 ** exponent, an int32 from -126 to 127."""

    def emit(context, builder, signature, args):
        biased = builder.add(args[0], ir.Constant(_I32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(_I32, 23)), _FLOAT)

    return types.float32(types.int32), emit


@intrinsic(prefer_literal=True)
def _dot(typing, queries, keys, ahead, pages, page, n, scale, weights, row, dim, group, itemsize, page_len):
    """Write the products of `group` queries with each of `n` keys, times `scale`, as float32.

    Keys lie in pages of `page_len`, that are `page` bytes apart, and whose numbers are at `pages`. Product of query j and key p lies at
    element `j * row + p` of `weights`. What lies `ahead` bytes behind each of the first keys is fetched meanwhile.
    """
    d, g, size = dim.literal_value, group.literal_value, itemsize.literal_value

    def emit(context, builder, signature, args):
        queries, keys, ahead, pages, page, n, scale, weights, row = args[:9]
        factor = _splat(builder, scale, _lanes(d))
        scaled = [
            [builder.fmul(q, factor) for q in _load(builder, _plus(builder, queries, j * d * size), d, size)]
            for j in range(g)
        ]
        with cgutils.for_range(builder, n) as loop:
            address = _in_pages(
                builder, keys, pages, page, ahead, loop.index, page_len.literal_value, d * size
            )
            key = _load(builder, address, d, size)
            for j in range(g):
                product = builder.fmul(scaled[j][0], key[0])
                for a, b in zip(scaled[j][1:], key[1:], strict=True):
                    product = _multiply_add(builder, a, b, product)
                element = builder.add(builder.mul(row, ir.Constant(_I64, j)), loop.index)
                at = builder.add(weights, builder.mul(element, ir.Constant(_I64, 4)))
                builder.store(_total(builder, product), builder.inttoptr(at, _FLOAT.as_pointer()))
        return context.get_dummy_value()

    return types.void(*(_W,) * 6, types.float32, _W, _W, dim, group, itemsize, page_len), emit


@intrinsic(prefer_literal=True)
def _mix(typing, weights, values, ahead, pages, page, n, factor, out, dim, itemsize, page_len):
    """Write the sum of `n` values by their float32 weights, times `factor`; values lie, and more is fetched, as in `_dot`."""
    d, size = dim.literal_value, itemsize.literal_value

    def emit(context, builder, signature, args):
        weights, values, ahead, pages, page, n, factor, out = args[:8]
        zeros = ir.Constant(ir.VectorType(_FLOAT, _lanes(d)), [0.0] * _lanes(d))
        sums = [cgutils.alloca_once_value(builder, zeros) for _ in range(d // _lanes(d))]
        with cgutils.for_range(builder, n) as loop:
            address = _in_pages(
                builder, values, pages, page, ahead, loop.index, page_len.literal_value, d * size
            )
            at = builder.add(weights, builder.mul(loop.index, ir.Constant(_I64, 4)))
            weight = _splat(builder, builder.load(builder.inttoptr(at, _FLOAT.as_pointer())), _lanes(d))
            for one, value in zip(sums, _load(builder, address, d, size), strict=True):
                builder.store(_multiply_add(builder, weight, value, builder.load(one)), one)
        scale = _splat(builder, factor, _lanes(d))
        _store(builder, out, [builder.fmul(builder.load(one), scale) for one in sums], size)
        return context.get_dummy_value()

    return types.void(*(_W,) * 6, types.float32, _W, dim, itemsize, page_len), emit


def _in_pages(builder, first, pages, page, ahead, index, page_len, n_bytes):
    """Return the address of element `index`, of `n_bytes`, of what lies in pages (see `_dot`), of which page 0 begins at `first`.

    If it is one of the first, what lies `ahead` is asked for: a hint, which may be of any address.
    """
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, near, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
    shift, inside = page_len.bit_length() - 1, ir.Constant(_I64, page_len - 1)
    number = builder.lshr(index, ir.Constant(_I64, shift))
    at = builder.inttoptr(builder.add(pages, builder.shl(number, ir.Constant(_I64, 3))), _I64.as_pointer())
    begin = builder.add(first, builder.mul(builder.load(at), page))
    address = builder.add(begin, builder.mul(builder.and_(index, inside), ir.Constant(_I64, n_bytes)))
    with builder.if_then(builder.icmp_signed("<", index, ir.Constant(_I64, _AHEAD))):
        for line in range(0, n_bytes, _CACHE_LINE):
            at = builder.inttoptr(_plus(builder, builder.add(address, ahead), line), _BYTES)
            builder.call(prefetch, [at, read, near, data])
    return address


def _lanes(dim):
    """Return the width of the vectors that `dim` elements, a multiple of 16, are read in. LLVM splits what the CPU cannot hold."""
    return 16 if dim % 32 == 0 else 8


def _load(builder, address, dim, itemsize):
    """Return `dim` elements as vectors of float32.

    Two bfloat16 numbers are a 32-bit word, and a bfloat16 is the upper half of its float32: the even element is the word's lower
    half shifted up, the odd one its upper half. Vectors of even elements and of odd ones alternate, until `_store` puts them back.
    """
    width = _lanes(dim)
    words, floats = ir.VectorType(_I32, width), ir.VectorType(_FLOAT, width)
    vectors = []
    for first in range(0, dim * itemsize, 4 * width):
        at = builder.inttoptr(_plus(builder, address, first), words.as_pointer())
        word = builder.load(at, align=itemsize)
        if itemsize == 4:
            vectors.append(builder.bitcast(word, floats))
        else:
            vectors.append(builder.bitcast(builder.shl(word, _same(width, 16)), floats))
            vectors.append(builder.bitcast(builder.and_(word, _same(width, 0xFFFF0000)), floats))
    return vectors


def _store(builder, address, vectors, itemsize):
    """Write vectors in the order of `_load`. None holds NaN."""
    width = vectors[0].type.count
    words = ir.VectorType(_I32, width)
    if itemsize == 2:
        bits = [_rounded(builder, vector, words) for vector in vectors]
        vectors = [
            builder.or_(builder.lshr(even, _same(width, 16)), builder.and_(odd, _same(width, 0xFFFF0000)))
            for even, odd in zip(bits[::2], bits[1::2], strict=True)
        ]
    for index, vector in enumerate(vectors):
        at = builder.inttoptr(_plus(builder, address, 4 * width * index), vector.type.as_pointer())
        builder.store(vector, at, align=itemsize)


def _rounded(builder, value, bits):
    """Return the bits of a float32 (or a vector) whose upper halves are it as bfloat16; `bits` is their type. Not for NaN."""
    width = getattr(bits, "count", None)
    sixteen, one, most = (
        ir.Constant(_I32, number) if width is None else _same(width, number) for number in (16, 1, 0x7FFF)
    )
    word = builder.bitcast(value, bits)
    is_odd = builder.and_(builder.lshr(word, sixteen), one)
    return builder.add(builder.add(word, most), is_odd)


def _same(width, value):
    return ir.Constant(ir.VectorType(_I32, width), [value] * width)


def _splat(builder, scalar, width):
    undefined = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _same(width, 0))


def _plus(builder, address, n_bytes):
    return builder.add(address, ir.Constant(_I64, n_bytes))


def _multiply_add(builder, a, b, c):
    """Return a * b + c, rounded once where the CPU can."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _total(builder, vector):
    """Return the sum of a vector."""
    kind, name = (
        ir.FunctionType(_FLOAT, [_FLOAT, vector.type]),
        f"llvm.vector.reduce.fadd.v{vector.type.count}f32",
    )
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [ir.Constant(_FLOAT, -0.0), vector], fastmath=("reassoc",))


@njit(fastmath={"contract"}, inline="always")
def _exp(x):
    """Return exp(x) of a float32 that is at most 0; what is below exp(-87) is that."""
    x = max(x, _LOWEST)
    n = np.int32(x * _LOG2_E - _HALF)  # rounds towards 0, so to nearest
    r = x - _F(n) * _LOG_2_HIGH - _F(n) * _LOG_2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    return (p * r * r + r + _ONE) * _power_of_two(n)


@njit(fastmath=_FAST, error_model="numpy")
def _norm_row(x, weight, epsilon, out):
    """Write x / sqrt(mean(x ** 2) + epsilon) * weight; `out` may be `x`."""
    dim, squares = len(x), _ZERO
    for d in range(dim):
        squares += _wide(x[d]) * _wide(x[d])
    scale = _ONE / np.sqrt(squares / _F(dim) + epsilon)
    for d in range(dim):
        out[d] = _narrow(_wide(x[d]) * scale * weight[d], x[d])


@njit(fastmath=_FAST)
def _rotate(x, cosine, sine):
    """Rotate a head in place by a row of the tables."""
    half = len(x) // 2
    for d in range(half):
        a, b = _wide(x[d]), _wide(x[half + d])
        x[d] = _narrow(a * _wide(cosine[d]) + b * _wide(sine[d]), x[d])
        x[half + d] = _narrow(b * _wide(cosine[half + d]) + a * _wide(sine[half + d]), x[d])


@njit
def _copy(source, target):
    for d in range(len(source)):
        target[d] = source[d]


@njit(fastmath=_FAST, error_model="numpy")
def _softmax(x, n):
    """Replace the first `n` elements by exp(x - max(x)); returns 1 / their sum."""
    largest, total = x[0], _ZERO
    for p in range(1, n):
        largest = max(largest, x[p])
    for p in range(n):
        weight = _exp(x[p] - largest)
        x[p] = weight
        total += weight
    return _ONE / total


def norm_kernel(itemsize: int, *, cache: bool):
    """Return the compiled norm of rows.

    Block: taken, rows, dim, then the addresses of x [rows, dim], weight (float32 [dim]), out [rows, dim], and epsilon (float64).
    """
    kind = _KINDS[itemsize]

    @cfunc(_SIGNATURE, cache=cache, error_model="numpy")
    def norm(block):
        words, numbers = carray(block, 7, np.int64), carray(block, 7, np.float64)
        rows, dim, epsilon = words[1], words[2], _F(numbers[6])
        x = carray(_pointer(words[3]), (rows, dim), kind)
        weight = carray(_pointer(words[4]), dim, np.float32)
        out = carray(_pointer(words[5]), (rows, dim), kind)
        while True:
            first = _take(block) * 8
            if first >= rows:
                break
            for row in range(first, min(first + 8, rows)):
                _norm_row(x[row], weight, epsilon, out[row])

    return norm


def place_kernel(itemsize: int, *, page_len: int, cache: bool):
    """Return the compiled norm of query and key heads (optional), their rotation in place, and the writes of keys and values.

    Block: taken, rows, heads, kv_heads, dim, angles, pages, then the addresses of the heads [rows, heads + 2 * kv_heads, dim], cosine and
    signed sine [2, angles, dim], positions, pages and places inside them (int64 [3, rows]), keys and values [2, pages, kv_heads, page_len,
    dim], the weights of the query norm and the key norm (float32 [dim]; 0 for none), and epsilon (float64).
    """
    kind = _KINDS[itemsize]

    @cfunc(_SIGNATURE, cache=cache, error_model="numpy")
    def place_heads(block):
        words = carray(block, 14, np.int64)
        rows, n_query, n_kv, dim = words[1], words[2], words[3], words[4]
        heads = carray(_pointer(words[7]), (rows, n_query + 2 * n_kv, dim), kind)
        angles = carray(_pointer(words[8]), (2, words[5], dim), kind)
        where = carray(_pointer(words[9]), (3, rows), np.int64)
        kept = carray(_pointer(words[10]), (2, words[6], n_kv, page_len, dim), kind)
        epsilon = _F(carray(block, 14, np.float64)[13])
        while True:
            first = _take(block) * 4
            if first >= rows:
                break
            for row in range(first, min(first + 4, rows)):
                position, page, place = where[0, row], where[1, row], where[2, row]
                for h in range(n_query + n_kv):
                    weight = words[11] if h < n_query else words[12]
                    if weight != 0:
                        head = heads[row, h]
                        _norm_row(head, carray(_pointer(weight), dim, np.float32), epsilon, head)
                    _rotate(heads[row, h], angles[0, position], angles[1, position])
                for h in range(n_kv):
                    _copy(heads[row, n_query + h], kept[0, page, h, place])
                    _copy(heads[row, n_query + n_kv + h], kept[1, page, h, place])

    return place_heads


def attend_kernel(itemsize: int, *, dim: int, group: int, page_len: int, cache: bool):
    """Return the compiled attention of one query a row and head, `group` of which share keys, to what its slot holds; row i has slot i.

    Block: taken, rows, kv_heads, pages of a row, then the addresses of the heads [rows, (group + 2) * kv_heads, dim], of which the
    queries are read, keys and values [all pages, kv_heads, page_len, dim], positions (int64 [rows]: the last one that a row looks at),
    the pages of each row in order (int64 [rows, pages of a row]), out [rows, group * kv_heads, dim], and the products' factor (float64).
    """
    head = dim * itemsize  # bytes

    @cfunc(_SIGNATURE, cache=cache, error_model="numpy")
    def attend(block):
        words = carray(block, 11, np.int64)
        rows, n_kv, n_pages = words[1], words[2], words[3]
        positions = carray(_pointer(words[7]), rows, np.int64)
        scale = _F(carray(block, 11, np.float64)[10])
        weights = np.empty((group, n_pages * page_len), np.float32)
        between, lane = words[6] - words[5], page_len * head
        while True:
            row = _take(block)
            if row >= rows:
                break
            n, pages = positions[row] + 1, words[8] + row * n_pages * 8
            for h in range(n_kv):
                keys, values = words[5] + h * lane, words[6] + h * lane
                query = words[4] + (row * (group + 2) * n_kv + h * group) * head
                out = words[9] + (row * n_kv + h) * group * head
                _dot(
                    query, keys, between, pages, n_kv * lane, n, scale, weights.ctypes.data, n_pages * page_len,
                    dim, group, itemsize, page_len,
                )  # fmt: skip
                for j in range(group):
                    factor = _softmax(weights[j], n)
                    ahead = lane - between if j == 0 else 0  # keys of the next head
                    _mix(
                        weights[j].ctypes.data, values, ahead, pages, n_kv * lane, n, factor, out + j * head,
                        dim, itemsize, page_len,
                    )  # fmt: skip

    return attend
