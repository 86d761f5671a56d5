"""Rotary frequencies of latent attention, which YaRN may stretch. Imports torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slime_models.family.families.latent import LatentArchitecture, YarnScaling


def latent_angles(architecture: LatentArchitecture, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, float32 [length, qk_rope_head_dim / 2], of positions 0 to length - 1, on the CPU."""
    n = architecture.qk_rope_head_dim
    frequencies = 1.0 / (architecture.rope_theta ** (torch.arange(0, n, 2, dtype=torch.int64).float() / n))
    factor = 1.0
    if (yarn := architecture.yarn) is not None:
        frequencies = _stretched(frequencies, yarn, theta=architecture.rope_theta)
        factor = yarn.table_factor
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def _stretched(frequencies: Tensor, yarn: YarnScaling, *, theta: float) -> Tensor:
    """Divide the frequencies that turn seldom within the first context, leave those that turn often, and go over between.

    Source: arXiv 2309.00071, section 3.2; transformers `modeling_rope_utils.py`, `_compute_yarn_parameters`.
    """
    n = len(frequencies)

    def dimension(turns: float) -> float:
        """Return which pair of dimensions turns so often within the first context."""
        return n * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    first, last = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * n - 1)
    width = last - first if last != first else 0.001
    divided = ((torch.arange(n, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / yarn.factor * divided + frequencies * (1 - divided)
