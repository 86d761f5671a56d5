"""`fingerprints`: fast 64-bit checksums of tensors, to compare what two processes hold."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from slime_models.transfer.threads import Piece, on_threads, parts_of

#: Bytes of a row. A byte's weight depends on its place in its row, and on its row.
_ROW_BYTES = 4096
#: Columns of the matrix that rows are multiplied by. Its entries are odd and at most 63: sums fit int32, and also where a
#: CPU adds products of two bytes in 16 bits with saturation (u8 * s8 without VNNI) they are exact.
_COLUMNS, _LARGEST = 8, 63
#: Tensors of fewer rows share a product: each has a cost of its own, and CUDA's wants more than 16 rows.
_FEW_ROWS = 32
#: Bytes whose rows are summed before the next tensors are looked at: it bounds scratch memory, to 1/50 of it.
_GROUP_BYTES = 1 << 28
#: Rows that a CPU multiplies at once: 1 MiB, which stays in its cache while the product's tiles go over it.
_BLOCK_ROWS = 256
#: Where CUDA's product wants a matrix to begin.
_ALIGNMENT = 16
# Odd multipliers of splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def fingerprint(tensor: Tensor) -> int:
    """Return the checksum of one tensor; see `fingerprints`, which waits for the device once for many."""
    return fingerprints([tensor])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Return a 64-bit checksum of each tensor's shape, dtype and elements (bits, in row-major order).

    It depends on neither device nor strides, nor on the other tensors. The bytes, as signed numbers and with zeros after
    them, are cut into rows of 4096. It is the sum modulo 2**64 of `row_weight[i] * byte_weight[j] * byte[i, j]` with
    pseudo-random odd weights: the product of the rows with a matrix of small numbers, which is exact in 32 bits and reads each
    byte once, and 64-bit arithmetic on that alone. A single flipped bit always changes the sum (odd numbers times a power
    of two below 2**64 are not 0); moved rows, columns or elements and other accidents go unnoticed with a probability of
    about 2**-50. It does not resist forgery.

    Reads each device once, at the end. Copies tensors that are not contiguous. In host memory it is computed on several threads.
    """
    labels: list[str] = []
    totals: list[int] = []
    waiting: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for group in _groups(tensors):
        flats, device = [_bytes(tensor) for tensor in group], group[0].device
        if device.type == "cpu":
            totals += _host_sums(flats)
        else:
            waiting.setdefault(device, []).append((len(totals), _device_sums(flats)))
            totals += [0] * len(flats)
        labels += [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in group]
    for parts in waiting.values():
        found = iter(torch.cat([sums for _, sums in parts]).tolist())
        for place, sums in parts:
            totals[place : place + len(sums)] = itertools.islice(found, len(sums))
    texts = [f"{total % (1 << 64)} {label}" for total, label in zip(totals, labels, strict=True)]
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return [int.from_bytes(digest, "little") for digest in digests]


def fingerprints_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return name -> checksum; see `fingerprints`."""
    named = dict(tensors)
    return dict(zip(named, fingerprints(named.values()), strict=True))


def _groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Cut the tensors into groups of one device each, and of `_GROUP_BYTES` or one tensor that is larger."""
    group: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if group and (held + tensor.nbytes > _GROUP_BYTES or tensor.device != group[0].device):
            yield group
            group, held = [], 0
        group.append(tensor)
        held += tensor.nbytes
    if group:
        yield group


def _host_sums(flats: Sequence[Tensor]) -> list[int]:
    """Return the weighted sum of the bytes of each tensor in host memory, modulo 2**64, computed on several threads."""
    parts = parts_of([flat.numel() for flat in flats], unit=_ROW_BYTES)
    sums = [0] * len(flats)
    for part, found in zip(parts, on_threads(lambda part: _part_sums(flats, part), parts), strict=True):
        for piece, total in zip(part, found, strict=True):
            sums[piece.owner] += total
    return sums


def _part_sums(flats: Sequence[Tensor], part: Sequence[Piece]) -> list[int]:
    """Return the weighted sum of the bytes of each piece in host memory, computed with few calls a piece."""
    cpu = torch.device("cpu")
    matrix, column_weights = _matrix(cpu), _column_weights(cpu).numpy()
    sizes = [piece.end - piece.start for piece in part]
    whole = [size // _ROW_BYTES if size >= _FEW_ROWS * _ROW_BYTES else 0 for size in sizes]
    rest_rows = [
        -(-(size - rows * _ROW_BYTES) // _ROW_BYTES) for size, rows in zip(sizes, whole, strict=True)
    ]
    n_whole, n_rest = sum(whole), sum(rest_rows)
    products = torch.empty(n_whole + max(n_rest, _FEW_ROWS if n_rest else 0), _COLUMNS, dtype=torch.int32)
    place, rests = 0, list[Tensor]()
    for piece, rows in zip(part, whole, strict=True):
        body_end = piece.start + rows * _ROW_BYTES
        body = flats[piece.owner][piece.start : body_end].view(-1, _ROW_BYTES)
        for start in range(0, rows, _BLOCK_ROWS):
            end = min(start + _BLOCK_ROWS, rows)
            torch._int_mm(body[start:end], matrix, out=products[place + start : place + end])
        place += rows
        rests.append(flats[piece.owner][body_end : piece.end])
    if n_rest:
        torch._int_mm(_stacked(rests, rest_rows), matrix, out=products[place:])
    by_row = products.numpy().astype(np.int64) @ column_weights
    firsts = [piece.start // _ROW_BYTES for piece in part]
    last = max(map(sum, zip(firsts, whole, rest_rows, strict=True)))
    row_weights = _row_weights(last, cpu).numpy()
    sums, begin, rest = list[int](), 0, n_whole
    for first, rows, more in zip(firsts, whole, rest_rows, strict=True):
        middle = first + rows
        total = int(np.dot(by_row[begin : begin + rows], row_weights[first:middle]))
        total += int(np.dot(by_row[rest : rest + more], row_weights[middle : middle + more]))
        sums.append(total)
        begin, rest = begin + rows, rest + more
    return sums


def _device_sums(flats: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of the bytes of each tensor, [n_tensors] int64 on their device, without waiting for it."""
    device = flats[0].device
    whole = [flat.numel() // _ROW_BYTES if flat.numel() >= _FEW_ROWS * _ROW_BYTES else 0 for flat in flats]
    rests = [flat[rows * _ROW_BYTES :] for flat, rows in zip(flats, whole, strict=True)]
    rest_rows = [-(-rest.numel() // _ROW_BYTES) for rest in rests]
    n_whole, n_rest = sum(whole), sum(rest_rows)
    if not n_whole + n_rest:
        return torch.zeros(len(flats), dtype=torch.int64, device=device)
    products = torch.empty(
        n_whole + max(n_rest, _FEW_ROWS if n_rest else 0), _COLUMNS, dtype=torch.int32, device=device
    )
    matrix = _matrix(device)
    start = 0
    for body in _bodies(flats, whole):
        torch._int_mm(body, matrix, out=products[start : start + len(body)])
        start += len(body)
    if n_rest:
        torch._int_mm(_stacked(rests, rest_rows), matrix, out=products[start:])
    by_row = (products[: n_whole + n_rest].to(torch.int64) * _column_weights(device)).sum(dim=1)
    counts = [*whole, *rest_rows]  # rows of each tensor, then what is left of each
    firsts = [*[0] * len(flats), *whole]
    weights = _row_weights(max(map(sum, zip(firsts, counts, strict=True))), device)
    by_row *= torch.cat([weights[first : first + count] for first, count in zip(firsts, counts, strict=True)])
    owners = torch.arange(len(flats)).repeat(2).repeat_interleave(torch.tensor(counts)).to(device)
    return torch.zeros(len(flats), dtype=torch.int64, device=device).index_add_(0, owners, by_row)


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.int8)
    return flat.clone() if flat.data_ptr() % _ALIGNMENT else flat


def _bodies(flats: Sequence[Tensor], whole: Sequence[int]) -> Iterator[Tensor]:
    """Yield the whole rows of all tensors, [rows, _ROW_BYTES]; tensors that lie one after the other in memory come as one."""
    first, n_rows, end = flats[0], 0, (0, 0)
    for flat, rows in zip(flats, whole, strict=True):
        if not rows:
            continue
        storage, begin = flat.untyped_storage().data_ptr(), flat.data_ptr()
        if n_rows and end != (storage, begin):
            yield first.as_strided((n_rows, _ROW_BYTES), (_ROW_BYTES, 1))
            n_rows = 0
        if not n_rows:
            first = flat
        n_rows += rows
        end = storage, begin + rows * _ROW_BYTES
    if n_rows:
        yield first.as_strided((n_rows, _ROW_BYTES), (_ROW_BYTES, 1))


def _stacked(rests: Sequence[Tensor], n_rows: Sequence[int]) -> Tensor:
    """Return a matrix of what is left of each tensor, in rows that zeros fill, and some more where there are few."""
    stacked = rests[0].new_zeros(max(sum(n_rows), _FEW_ROWS), _ROW_BYTES)
    start, flat = 0, stacked.view(-1)
    for rest, rows in zip(rests, n_rows, strict=True):
        if rows:
            flat[start : start + rest.numel()] = rest
            start += rows * _ROW_BYTES
    return stacked


@functools.lru_cache
def _matrix(device: torch.device) -> Tensor:
    """Return the small odd numbers that rows are multiplied by, [_ROW_BYTES, _COLUMNS] int8; not to be written to."""
    drawn = _weights(_ROW_BYTES * _COLUMNS, 1, device) >> 1 & _LARGEST  # 6 bits: the odd numbers of -63 to 63
    return (drawn * 2 - _LARGEST).to(torch.int8).view(_ROW_BYTES, _COLUMNS)


@functools.lru_cache
def _column_weights(device: torch.device) -> Tensor:
    """Return the weights of columns, of which all but one are odd, so that a byte's weight is."""
    weights = _weights(_COLUMNS, 2, device)
    weights[0] -= 1
    return weights


def _row_weights(count: int, device: torch.device) -> Tensor:
    """Return the weights of at least `count` rows; not to be written to."""
    return _many_row_weights(1 << max(count - 1, 1).bit_length(), device)


@functools.lru_cache
def _many_row_weights(count: int, device: torch.device) -> Tensor:
    return _weights(count, 3, device)


def _weights(count: int, stream: int, device: torch.device) -> Tensor:
    """Return `count` odd pseudo-random int64 numbers; a prefix of a longer answer is the shorter answer."""
    weights = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    weights = (weights << 2 | stream) * _signed(_GOLDEN)
    for multiplier in _MIX:
        weights = (weights ^ (weights >> 29)) * _signed(multiplier)
    return weights ^ (weights >> 31) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
