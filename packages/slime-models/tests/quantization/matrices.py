"""Random matrices, and quantisations by the name of their format."""

from __future__ import annotations

import torch

#: Largest magnitude over the largest error: 15 for integers (half of 1 / 7.5) and 28 for float8 (16 of 448), but for scales of
#: bfloat16.
HALF_STEP = 14.9


def weights(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)).to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)
