"""Rotary frequencies, stretched as config.json says, as transformers computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slime_models.family.architecture import Architecture, RopeScaling
from slime_models.family.yarn import YarnScaling


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Return float32 [rotary_dim / 2]: radians by which each pair of dimensions turns from one position to the next."""
    n, scaling = architecture.rotary_dim, architecture.rope_scaling
    exponents = torch.arange(0, n, 2, dtype=torch.int64).float() / n
    frequencies = 1.0 / (architecture.rope_theta**exponents)
    if isinstance(scaling, YarnScaling):
        return _yarn(frequencies, scaling, theta=architecture.rope_theta)
    return frequencies if scaling is None else _llama3(frequencies, scaling)


def attention_factor(architecture: Architecture) -> float:
    """Return what cosine and sine are multiplied by."""
    scaling = architecture.rope_scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def half_tables(architecture: Architecture, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, float32 [length, rotary_dim / 2], of positions 0 to length - 1, on the CPU."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(architecture))
    factor = attention_factor(architecture)
    return angles.cos() * factor, angles.sin() * factor


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


def _yarn(frequencies: Tensor, scaling: YarnScaling, *, theta: float) -> Tensor:
    """Leave frequencies of `beta_fast` turns within the original context, divide those of `beta_slow`, and go over linearly.

    The way over is linear in the number of the dimension. Source: arXiv 2309.00071, section 3.2; transformers
    `modeling_rope_utils.py`, `_compute_yarn_parameters`.
    """
    n = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        positions = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return n * math.log(positions) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n - 1)
    width = last - first or 0.001
    divided = ((torch.arange(n // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)
