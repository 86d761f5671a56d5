"""Quantising matrices to float8 or int4 codes and scales, and back: pure functions of tensors, on any device.

A block of `rows` x `columns` elements shares a scale; None stands for all of them. So a scale for the whole tensor is
(None, None), one for each output channel is (1, None), one for each group of a row is (1, group size). Blocks at the
lower and the right edge may be cut off by it.

A scale is what a code is multiplied by. It is a block's largest magnitude over the largest code (448 for float8 e4m3, 7.5
for four bits, whose codes are -8 to 7), and 1 where that is 0. Codes are quotients by it, rounded to the nearest, ties to even.

Source: DeepSeek-V3's `weight_scale_inv`, which despite its name is multiplied by, and compressed-tensors 0.18 (whose scale
of a block of zeros is its dtype's epsilon). transformers' `Fp8Quantize` multiplies by the reciprocal of a scale instead of
dividing by it, so that its scales may differ in their last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_INT4_HALF, _INT4_MIN, _INT4_MAX = 7.5, -8, 7
#: Codes of four bits in a word of 32, lowest bits first.
PER_WORD = 8


def quantize_fp8(
    weight: Tensor, *, rows: int | None, columns: int | None, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Return float8 codes of the matrix's shape, and float32 scales [blocks down, blocks across].

    With `power_of_two` each scale is rounded up to a power of 2 (`ue8m0`: an exponent and nothing else).

    Raises:
        ValueError: the matrix holds inf or nan.
    """
    tiles = _tiled(weight.float(), rows, columns)
    scales = _largest(tiles) / _FP8_MAX
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)  # of 2**n: 0.5 and n + 1
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    scales = _usable(scales)
    codes = (tiles / scales[:, None, :, None]).clamp_(-_FP8_MAX, _FP8_MAX)
    return _untiled(codes, weight).to(FP8), scales


def dequantize_fp8(codes: Tensor, scales: Tensor, *, rows: int | None, columns: int | None) -> Tensor:
    """Return the float32 matrix that codes and scales of `quantize_fp8` stand for."""
    tiles = _tiled(codes.float(), rows, columns)
    return _untiled(tiles * scales[:, None, :, None], codes)


def quantize_int4(weight: Tensor, *, group_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return packed codes, int32 [rows, columns / 8 rounded up], and scales of `dtype` [rows, groups].

    Codes are quotients by the scales as they are kept, rounded to `dtype`. Eight of a row are packed into a word, lowest
    bits first, each as code + 8.

    Raises:
        ValueError: the matrix holds inf or nan, or its columns are no multiple of `group_size`.
    """
    if weight.shape[1] % group_size:
        raise ValueError(
            f"found {weight.shape[1]} columns; wanted a multiple of the group size, {group_size}"
        )
    tiles = _tiled(weight.float(), 1, group_size)
    scales = _usable((_largest(tiles) / _INT4_HALF).to(dtype))
    codes = (tiles / scales.float()[:, None, :, None]).round_().clamp_(_INT4_MIN, _INT4_MAX)
    return _pack(_untiled(codes, weight).int() - _INT4_MIN), scales


def dequantize_int4(packed: Tensor, scales: Tensor, *, columns: int) -> Tensor:
    """Return the float32 matrix [rows, columns] that `quantize_int4` made these of."""
    shifts = 4 * torch.arange(PER_WORD, dtype=torch.int32, device=packed.device)
    codes = ((packed[:, :, None] >> shifts) & 15).flatten(1)[:, :columns] + _INT4_MIN
    tiles = _tiled(codes.float(), 1, columns // scales.shape[1])
    return _untiled(tiles * scales.float()[:, None, :, None], codes)


def n_blocks(shape: tuple[int, ...], rows: int | None, columns: int | None) -> tuple[int, int]:
    """Return how many blocks a matrix has, down and across."""
    down, across = (-(-size // (block or size)) for size, block in zip(shape, (rows, columns), strict=True))
    return down, across


def _pack(nibbles: Tensor) -> Tensor:
    padding = -nibbles.shape[1] % PER_WORD
    words = torch.nn.functional.pad(nibbles, (0, padding)).reshape(len(nibbles), -1, PER_WORD)
    shifts = 4 * torch.arange(PER_WORD, dtype=torch.int32, device=nibbles.device)
    return torch.sum(words << shifts, dim=-1, dtype=torch.int32)


def _tiled(matrix: Tensor, rows: int | None, columns: int | None) -> Tensor:
    """Return a matrix as [blocks down, rows, blocks across, columns], padded with zeros."""
    height, width = matrix.shape
    rows, columns = rows or height, columns or width
    down, across = n_blocks((height, width), rows, columns)
    if height % rows or width % columns:
        matrix = torch.nn.functional.pad(matrix, (0, -width % columns, 0, -height % rows))
    return matrix.reshape(down, rows, across, columns)


def _untiled(tiles: Tensor, like: Tensor) -> Tensor:
    height, width = like.shape
    return tiles.flatten(2).flatten(0, 1)[:height, :width]


def _largest(tiles: Tensor) -> Tensor:
    largest = tiles.abs().amax(dim=(1, 3))
    if not largest.isfinite().all():
        raise ValueError("found inf or nan; wanted finite weights")
    return largest


def _usable(scales: Tensor) -> Tensor:
    """Return the scales with 1 for 0, which a block of zeros has, and one of numbers too small for the scale's dtype."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)
