"""Products, and what follows them, against float64."""

from __future__ import annotations

import pytest
import torch
from slime_torch.storage.weights import Fused, Weights, can_pack

CPU = torch.device("cpu")
RANDOM = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


@pytest.mark.parametrize("packed", [False, pytest.param(True, id="packed")])
@pytest.mark.parametrize("then", ["none", "swish", "add", "mul"])
def test_a_product_is_followed_by_what_was_asked_for(packed, then):
    dtype = torch.bfloat16 if packed else torch.float32
    if packed and not can_pack(dtype, CPU):
        packed = False  # a CPU that does not multiply bfloat16 natively: the plain layout is what runs there
    fused = Fused({"a": (32, 64), "b": (16, 64)}, dtype=dtype, device=CPU, packed=packed)
    bias = Fused({"c": (48,)}, dtype=dtype, device=CPU)
    parts, vector = {"a": randn(32, 64), "b": randn(16, 64)}, randn(48)
    fused.write(parts)
    bias.write({"c": vector})
    x, other = randn(7, 64).to(dtype), randn(7, 48).to(dtype)
    matrix = torch.cat([parts["a"], parts["b"]]).to(dtype).double()
    product, second = x.double() @ matrix.T + vector.to(dtype).double(), other.double()
    wanted, slope = {
        "none": (product, 0.0),
        "swish": (product * product.sigmoid(), 1.1),
        "add": (product + second, 1.0),
        "mul": (product * second, second.abs()),
    }[then]  # what is asked for, and by how much an error of the product grows in it
    got = fused.linear(x, bias, then=then, other=other if then in ("add", "mul") else None)
    bound = 2**-8 if dtype == torch.bfloat16 else 1e-5
    of_product = 0.0 if packed else bound * product.abs() * slope  # the plain layout rounds the product, too
    assert torch.all((got.double() - wanted).abs() <= bound * (1 + wanted.abs()) + of_product)


def test_rows_in_another_order_are_read_as_they_were_written():
    fused = Fused({"a": (4, 3), "b": (2, 3)}, dtype=torch.float32, device=CPU, orders={"a": [2, 0, 3, 1]})
    parts = {"a": randn(4, 3), "b": randn(2, 3)}
    fused.write(parts)
    assert all(torch.equal(fused.read()[name], part) for name, part in parts.items())
    stored = torch.cat([parts["a"][[2, 0, 3, 1]], parts["b"]])
    x = randn(5, 3)
    torch.testing.assert_close(fused.linear(x), x @ stored.T)


def test_a_write_looks_at_nothing_but_the_tensors_that_hold_its_names():
    held, other = (Fused({name: (2, 3)}, dtype=torch.float32, device=CPU) for name in "ab")
    weights = Weights([held, other])
    del other.parts  # a model with experts has thousands of others, and an update as many buckets
    weights.write({"a": torch.ones(2, 3)})
    assert torch.equal(held.tensor, torch.ones(2, 3))
