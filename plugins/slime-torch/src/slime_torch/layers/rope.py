"""Rotary position embedding: the tables of cosines and sines."""

from __future__ import annotations

import torch
from slime_core.errors import EngineError
from slime_models.family.architecture import Architecture
from slime_models.family.rotary import half_tables
from torch import Tensor
from torch.nn import functional as F


def rope_tables(architecture: Architecture, length: int) -> tuple[Tensor, Tensor]:
    """Return (cosine, signed sine), float32 [length, head_dim], for positions 0 to `length - 1`.

    The sine carries the minus sign of the first half: rotating is `x * cos + roll(x, head_dim / 2) * sin`. Both
    halves of a head hold the same frequencies, the layout of most Hugging Face checkpoints; see `stored_order` for the others.
    Dimensions that are not rotated have the angle 0.
    """
    unrotated = architecture.head_dim - architecture.rotary_dim
    cosine, sine = half_tables(architecture, length)
    cosine = F.pad(cosine, (0, unrotated // 2), value=1.0)
    sine = F.pad(sine, (0, unrotated // 2))
    return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)


def stored_order(architecture: Architecture) -> list[int] | None:
    """Return which dimension of a head the engine stores in each place; None where it is the folder's.

    What is rotated together lies half a head apart, as kernels have it. Scores do not depend on the order of dimensions, as
    long as queries and keys have the same.

    Raises:
        EngineError: the dimensions that are not rotated are not in pairs.
    """
    rotated, dim = architecture.rotary_dim, architecture.head_dim
    if (dim - rotated) % 2 or rotated % 2:
        raise EngineError(
            f"partial_rotary_factor: found {architecture.partial_rotary_factor:g}, {rotated} of {dim} dimensions; wanted even "
            "numbers of rotated and other dimensions; use another --rollout-engine"
        )
    if architecture.rotary_interleaved:
        first, second = list(range(0, rotated, 2)), list(range(1, rotated, 2))
    else:
        first, second = list(range(rotated // 2)), list(range(rotated // 2, rotated))
    others, half = list(range(rotated, dim)), (dim - rotated) // 2
    order = [*first, *others[:half], *second, *others[half:]]
    return None if order == list(range(dim)) else order


def rotate_(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotate heads [n, heads, head_dim] in place by the rows of the tables, [n, 1, head_dim]."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cosine).addcmul_(swapped, sine)
