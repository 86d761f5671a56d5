"""`fingerprint`: a fast 64-bit checksum of a tensor, to compare what two processes hold."""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

#: Words of a block. A word's weight depends on its place in its block, and on its block.
_BLOCK = 4096
#: Bytes that are worked on at once: on a CPU a piece fits the cache, on a device it bounds scratch memory.
_PIECE_BYTES = {"cpu": 1 << 22}
_DEVICE_PIECE_BYTES = 1 << 26
# Odd multipliers of splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit checksum of the tensor's shape, dtype and elements (bits, in row-major order).

    It depends on neither device nor strides. It is the sum modulo 2**64, over the tensor's 64-bit words, of
    `weight[i] * (word + (word >> 32))` with odd pseudo-random weights. The shift is arithmetic, and brings
    the top bits, which a product pushes out, down to where they count. A single flipped bit always changes
    the sum (an odd number times a power of two below 2**64 is not 0); moved rows, columns or elements and
    other accidents go unnoticed with a probability of about 2**-30. It does not resist forgery.

    Copies tensors that are not contiguous, and waits for the device.
    """
    words, tail = _words(tensor.detach())
    total = _weighted_sum(words) + (0 if tail is None else _weighted_sum(tail) * _GOLDEN)
    text = f"{total % (1 << 64)} {tensor.dtype} {tuple(tensor.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _words(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the bytes as int64 words, and what is left over, if any, as one zero-padded word."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    body = flat[:whole]
    if body.data_ptr() % 8 or body.storage_offset() % 8:
        body = body.clone()
    if whole == flat.numel():
        return body.view(torch.int64), None
    rest = flat.new_zeros(8)
    rest[: flat.numel() - whole] = flat[whole:]
    return body.view(torch.int64), rest.view(torch.int64)


def _weighted_sum(words: Tensor) -> int:
    """Return sum(inner[i % _BLOCK] * outer[i // _BLOCK] * (word + (word >> 32))) modulo 2**64."""
    device, n_words = words.device, words.numel()
    if n_words == 0:
        return 0
    n_blocks = -(-n_words // _BLOCK)
    inner, outer = _inner_weights(device), _weights(n_blocks, 2, device)
    sums = torch.empty(n_blocks, dtype=torch.int64, device=device)
    per_piece = max(1, _PIECE_BYTES.get(device.type, _DEVICE_PIECE_BYTES) // (8 * _BLOCK))
    n_full = n_words // _BLOCK
    full = words[: n_full * _BLOCK].view(n_full, -1) if n_full else words.new_empty(0, 0)
    scratch = torch.empty(min(per_piece, n_full), _BLOCK, dtype=torch.int64, device=device)
    for start in range(0, n_full, per_piece):
        piece = full[start : start + per_piece]
        mixed = torch.bitwise_right_shift(piece, 32, out=scratch[: piece.shape[0]])
        torch.sum(mixed.add_(piece).mul_(inner), dim=1, out=sums[start : start + piece.shape[0]])
    if n_full < n_blocks:
        last = words[n_full * _BLOCK :]
        sums[n_full] = ((last + (last >> 32)) * inner[: last.numel()]).sum()
    return int((sums * outer).sum().item())


@functools.lru_cache
def _inner_weights(device: torch.device) -> Tensor:
    """Return the weights of a block's words; not to be written to."""
    return _weights(_BLOCK, 1, device)


def _weights(count: int, stream: int, device: torch.device) -> Tensor:
    """Return `count` odd pseudo-random int64 numbers; a prefix of a longer answer is the shorter answer."""
    weights = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    weights = (weights << 2 | stream) * _signed(_GOLDEN)
    for multiplier in _MIX:
        weights = (weights ^ (weights >> 29)) * _signed(multiplier)
    return weights ^ (weights >> 31) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
