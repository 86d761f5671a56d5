"""Tables of rotary angles."""

from __future__ import annotations

import torch
from slime_models.family.architecture import Architecture
from slime_models.family.rotary import attention_factor, inverse_frequencies
from torch import Tensor


def rotary_tables(architecture: Architecture, length: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, rotary_dim] of the angles of positions 0 to length - 1, on the CPU; see `tables_of`."""
    frequencies, factor = inverse_frequencies(architecture), attention_factor(architecture)
    return tables_of(frequencies, length, dtype=dtype, factor=factor)


def tables_of(
    frequencies: Tensor, length: int, *, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [length, 2 n] of the angles of positions 0 to length - 1, on the CPU.

    Angles are computed in float32 and the result is cast to `dtype`, as transformers does; both halves of the
    last dimension are equal.

    Args:
        frequencies: float32 [n], radians from one position to the next.
        length: number of positions.
        dtype: of the result.
        factor: multiplies both.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
