"""`fingerprints`: fast 64-bit checksums of tensors, to compare what two processes hold."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from slime_models.jit import compiled
from slime_models.transfer.threads import Piece, copy_all, is_compiled_for, is_plain, on_threads, parts_of
from slime_models.triton_launch import can_launch

_Bytes = np.ndarray[tuple[int], np.dtype[np.int8]]
_Words = np.ndarray[tuple[int], np.dtype[np.int64]]
#: `_sum_words`, or what numba compiles for some bytes.
_SumWords = Callable[[_Words, int, _Words, _Words], int]
#: What numba compiles: it is told first where to copy the bytes to (0 for nowhere), their address and their number.
_Compiled = Callable[[int, int, int, _Words, int, _Words, _Words], int]

#: Bytes of a row. A word's weight depends on its place in its row, and on its row.
_ROW_BYTES = 4096
_WORD_BYTES = 8
#: What is copied and summed at once goes to a multiple of so many bytes.
_TARGET_BYTES = 32
_WORDS = _ROW_BYTES // _WORD_BYTES
#: On a device, tensors of fewer rows are copied together: each operation has a cost of its own.
_FEW_ROWS = 32
#: Bytes whose rows are summed before the next tensors are looked at.
_GROUP_BYTES = 1 << 28
#: Rows of which a CPU without numba holds products at once, which stay in its cache; and a device without Triton.
_BLOCK_ROWS, _DEVICE_ROWS = 256, 1 << 13
# Odd multipliers of splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def fingerprint(tensor: Tensor) -> int:
    """Return the checksum of one tensor; see `fingerprints`, which waits for the device once for many."""
    return fingerprints([tensor])[0]


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Return a 64-bit checksum of each tensor's shape, dtype and elements (bits, in row-major order).

    It depends on neither device nor strides, nor on the other tensors. The bytes, with zeros after them, are cut into 64-bit
    words `w` (signed, little-endian), and these into rows of 512. It is the sum modulo 2**64 of
    `row_weight[i] * word_weight[j] * (w[i, j] + (w[i, j] >> 32))` with pseudo-random odd weights. A single flipped bit
    always changes the sum (an odd number times a power of two below 2**64 is not 0); two that cancel each other have a
    probability of 2**-32 or less, as at least so many bits of their products are random: the upper half of a word counts in
    its lower half, too. Moved rows, columns or elements and other accidents go unnoticed with a probability of about
    2**-60. It does not resist forgery.

    Reads each device once, at the end. Copies tensors that are not contiguous. In host memory it is computed on several threads,
    and where numba is installed at the rate at which memory is read.
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
        labels += [_label(tensor) for tensor in group]
    for parts in waiting.values():
        found = iter(torch.cat([sums for _, sums in parts]).tolist())
        for place, sums in parts:
            totals[place : place + len(sums)] = itertools.islice(found, len(sums))
    return [_digest(total, label) for total, label in zip(totals, labels, strict=True)]


def copied_fingerprints(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Copy tensors as `copy_all` does, and return the checksum of each source; see `fingerprints`.

    Where numba is installed, and both lie contiguous in host memory, each byte is read once for the two.

    Args:
        pairs: (target, source) of one shape each.
    """
    n_bytes = sum(source.nbytes for _, source in pairs)
    if n_bytes and is_compiled_for(n_bytes) and all(_is_aligned(*pair) for pair in pairs):
        flats = [_bytes(source) for _, source in pairs]
        totals = _host_sums(flats, [target.data_ptr() for target, _ in pairs])
        return [_digest(total, _label(source)) for total, (_, source) in zip(totals, pairs, strict=True)]
    copy_all(pairs)
    return fingerprints(source for _, source in pairs)


def _is_aligned(target: Tensor, source: Tensor) -> bool:
    """Whether what numba compiles copies these bytes and sums them, both in host memory."""
    if not is_plain(target, source):
        return False
    return target.data_ptr() % _TARGET_BYTES == 0 and source.data_ptr() % _WORD_BYTES == 0


def _label(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _digest(total: int, label: str) -> int:
    """Return the checksum of a tensor of this label and weighted sum."""
    text = f"{total % (1 << 64)} {label}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


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


def _host_sums(flats: Sequence[Tensor], targets: Sequence[int] | None = None) -> list[int]:
    """Return the weighted sum of the words of each tensor in host memory, modulo 2**64, computed on several threads.

    Args:
        flats: bytes of the tensors.
        targets: addresses that what numba compiles is to copy them to, multiples of `_TARGET_BYTES`.
    """
    sizes = [flat.numel() for flat in flats]
    sum_words = _compiled() if is_compiled_for(sum(sizes)) else None
    cpu = torch.device("cpu")
    weights = _word_weights(cpu).numpy(), _row_weights(max(sizes) // _ROW_BYTES + 1, cpu).numpy()
    arrays = [flat.numpy() for flat in flats]

    def piece_sum(piece: Piece) -> int:
        raw = arrays[piece.owner][piece.start : piece.end]
        if sum_words is None:
            return _piece_sum(raw, piece.start, weights, _sum_words)
        target = 0 if targets is None else targets[piece.owner] + piece.start
        source = flats[piece.owner].data_ptr() + piece.start
        return _piece_sum(raw, piece.start, weights, functools.partial(sum_words, target, source, len(raw)))

    def part_sums(part: Sequence[Piece]) -> list[int]:
        return [piece_sum(piece) for piece in part]

    parts = parts_of(sizes, unit=_ROW_BYTES)
    sums = [0] * len(flats)
    for part, found in zip(parts, on_threads(part_sums, parts), strict=True):
        for piece, total in zip(part, found, strict=True):
            sums[piece.owner] += total
    return sums


def _piece_sum(raw: _Bytes, start: int, weights: tuple[_Words, _Words], sum_words: _SumWords) -> int:
    """Return the weighted sum of the words of bytes that begin at byte `start` of their tensor, at a row."""
    n_words, n_left = divmod(len(raw), _WORD_BYTES)
    total = int(sum_words(raw[: n_words * _WORD_BYTES].view(np.int64), start // _ROW_BYTES, *weights))
    if n_left:
        word = int.from_bytes(raw[-n_left:].tobytes(), "little")  # its upper byte is 0
        row, place = divmod(start // _WORD_BYTES + n_words, _WORDS)
        total += (word + (word >> 32)) * int(weights[0][place]) * int(weights[1][row])
    return total


def _sum_words(words: _Words, first_row: int, word_weights: _Words, row_weights: _Words) -> int:
    """Return the weighted sum of words, the first of which begins a row of that number, modulo 2**64."""
    total = 0
    n_rows = len(words) // _WORDS
    rows = words[: n_rows * _WORDS].reshape(n_rows, _WORDS)
    bodies = [rows[start : start + _BLOCK_ROWS] for start in range(0, n_rows, _BLOCK_ROWS)]
    for body in (*bodies, words[n_rows * _WORDS :].reshape(1, -1)):
        weighted = body >> 32
        weighted += body
        weighted *= word_weights[: body.shape[1]]
        total += int(np.dot(weighted.sum(axis=1), row_weights[first_row : first_row + len(body)]))
        first_row += len(body)
    return total


def _row_sums(rows: Tensor, word_weights: Tensor, scratch: Tensor) -> Tensor:
    """Return the weighted sum of each row, [n_rows] int64, of words [n_rows, _WORDS]; `scratch` has room for as many."""
    weighted = scratch[: rows.numel()].view(rows.shape)
    torch.bitwise_right_shift(rows, 32, out=weighted)
    weighted += rows
    weighted *= word_weights
    return weighted.sum(dim=1)


@functools.cache
def _compiled() -> _Compiled:
    """Return `_sum_words` as numba compiles it."""
    from slime_models.transfer.kernels.numba_kernels import make_sum_words

    found: _Compiled = compiled(make_sum_words)
    return found


def _device_sums(flats: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of the words of each tensor, [n_tensors] int64 on their device, without waiting for it."""
    device = flats[0].device
    whole = [flat.numel() // _ROW_BYTES if flat.numel() >= _FEW_ROWS * _ROW_BYTES else 0 for flat in flats]
    rests = [flat[rows * _ROW_BYTES :] for flat, rows in zip(flats, whole, strict=True)]
    rest_rows = [-(-rest.numel() // _ROW_BYTES) for rest in rests]
    if not sum(whole) + sum(rest_rows):
        return torch.zeros(len(flats), dtype=torch.int64, device=device)
    bodies = list(_bodies(flats, whole))
    if sum(rest_rows):
        bodies.append(_stacked(rests, rest_rows))
    by_row = torch.cat([_sums_of_body(body.view(torch.int64)) for body in bodies])
    counts = [*whole, *rest_rows]  # rows of each tensor, then what is left of each
    firsts = [*[0] * len(flats), *whole]
    weights = _row_weights(max(map(sum, zip(firsts, counts, strict=True))), device)
    by_row *= torch.cat([weights[first : first + count] for first, count in zip(firsts, counts, strict=True)])
    owners = torch.arange(len(flats)).repeat(2).repeat_interleave(torch.tensor(counts)).to(device)
    return torch.zeros(len(flats), dtype=torch.int64, device=device).index_add_(0, owners, by_row)


def _sums_of_body(words: Tensor) -> Tensor:
    """Return the weighted sum of each row, [n_rows] int64, of words [n_rows, _WORDS] on a device."""
    weights = _word_weights(words.device)
    if can_launch(words.device):
        from slime_models.transfer.kernels.triton_kernels import row_sums

        found: Tensor = row_sums(words, weights)
        return found
    scratch = words.new_empty(min(len(words), _DEVICE_ROWS) * _WORDS)
    return torch.cat([_row_sums(block, weights, scratch) for block in words.split(_DEVICE_ROWS)])


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.int8)
    return flat.clone() if flat.data_ptr() % _WORD_BYTES else flat


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
    """Return a matrix of what is left of each tensor, in rows that zeros fill."""
    stacked = rests[0].new_zeros(sum(n_rows), _ROW_BYTES)
    start, flat = 0, stacked.view(-1)
    for rest, rows in zip(rests, n_rows, strict=True):
        if rows:
            flat[start : start + rest.numel()] = rest
            start += rows * _ROW_BYTES
    return stacked


@functools.lru_cache
def _word_weights(device: torch.device) -> Tensor:
    """Return the weights of a row's words, [_WORDS] int64; not to be written to."""
    return _weights(_WORDS, 1, device)


def _row_weights(count: int, device: torch.device) -> Tensor:
    """Return the weights of at least `count` rows; not to be written to."""
    return _many_row_weights(1 << max(count - 1, 1).bit_length(), device)


@functools.lru_cache
def _many_row_weights(count: int, device: torch.device) -> Tensor:
    return _weights(count, 2, device)


def _weights(count: int, stream: int, device: torch.device) -> Tensor:
    """Return `count` odd pseudo-random int64 numbers; a prefix of a longer answer is the shorter answer."""
    weights = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    weights = (weights << 2 | stream) * _signed(_GOLDEN)
    for multiplier in _MIX:
        weights = (weights ^ (weights >> 29)) * _signed(multiplier)
    return weights ^ (weights >> 31) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
