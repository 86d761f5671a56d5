"""The norm against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from slime_torch.layers.norm import Norm


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_a_norm_divides_by_the_root_of_the_mean_square(dtype, bound):
    random = torch.Generator().manual_seed(0)
    norm = Norm("w", (96,), epsilon=1e-5, dtype=dtype, device=torch.device("cpu"))
    weight = torch.randn(96, generator=random)
    x = (torch.randn(5, 3, 96, generator=random) * 0.01 + 0.02).to(dtype)
    norm.write({"w": weight})
    wide = x.double()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.to(dtype).double()
    torch.testing.assert_close(norm(x).double(), wanted, rtol=bound, atol=1e-6)
    norm.write({"w": -2 * weight})
    torch.testing.assert_close(norm(x).double(), -2 * wanted, rtol=bound, atol=2e-6)
