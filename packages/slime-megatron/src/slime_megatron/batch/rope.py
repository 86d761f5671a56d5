"""Rotary angles, as transformers computes them."""

from __future__ import annotations

import math

import torch
from slime_models.family.architecture import Architecture, RopeScaling
from torch import Tensor


def rotary_tables(architecture: Architecture, length: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, rotary_dim] of the angles of positions 0 to length - 1, on the CPU; see `tables_of`."""
    return tables_of(inverse_frequencies(architecture), length, dtype=dtype)


def tables_of(frequencies: Tensor, length: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, 2 n] of the angles of positions 0 to length - 1, on the CPU.

    Angles are computed in float32 and the result is cast to `dtype`, as transformers does; both halves of the
    last dimension are equal.

    Args:
        frequencies: float32 [n], radians from one position to the next.
        length: number of positions.
        dtype: of the result.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Return float32 [rotary_dim / 2]: radians by which each pair of dimensions turns from one position to the next."""
    n = architecture.rotary_dim
    exponents = torch.arange(0, n, 2, dtype=torch.int64).float() / n
    frequencies = 1.0 / (architecture.rope_theta**exponents)
    return (
        frequencies if architecture.rope_scaling is None else _llama3(frequencies, architecture.rope_scaling)
    )


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by `factor`, leave high ones, and go over smoothly between.

    Source: transformers `modeling_rope_utils.py`, `_compute_llama3_parameters` (Llama 3.1).
    """
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    share = (context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    low = wavelengths > context / scaling.low_freq_factor
    high = wavelengths < context / scaling.high_freq_factor
    return torch.where(low, frequencies / scaling.factor, torch.where(high, frequencies, between))
