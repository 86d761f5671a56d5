"""The parts of a decoding step, each against its definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from slime_torch.cache import KvCache
from slime_torch.weights import Fused, Norm, can_pack

CPU = torch.device("cpu")
RANDOM = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_a_norm_divides_by_the_root_of_the_mean_square(dtype, bound):
    norm = Norm("w", (96,), epsilon=1e-5, dtype=dtype, device=CPU)
    weight, x = randn(96), (randn(5, 3, 96) * 0.01 + 0.02).to(dtype)
    norm.write({"w": weight})
    wide = x.double()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.to(dtype).double()
    torch.testing.assert_close(norm(x).double(), wanted, rtol=bound, atol=1e-6)
    norm.write({"w": -2 * weight})
    torch.testing.assert_close(norm(x).double(), -2 * wanted, rtol=bound, atol=2e-6)


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
    wanted = x.double() @ matrix.T + vector.to(dtype).double()
    wanted = {
        "none": wanted,
        "swish": wanted * wanted.sigmoid(),
        "add": wanted + other.double(),
        "mul": wanted * other.double(),
    }[then]
    got = fused.linear(x, bias, then=then, other=other if then in ("add", "mul") else None)
    bound = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)


def test_the_cache_keeps_what_it_holds_whatever_its_size_and_allocates_no_more():
    architecture = SimpleNamespace(head_dim=8, num_query_groups=2, num_layers=3)
    cache = KvCache(architecture, max_slots=32, dtype=torch.float32, device=CPU)
    cache.reserve(3, 5)
    lengths = {0: 5, 1: 3, 2: 4}
    stored = [
        randn(3, 4, 8) for _ in range(3)
    ]  # of each layer: one token's keys and values for each of 3 slots
    where = cache.rows(torch.arange(3), torch.tensor([length - 1 for length in lengths.values()]))
    for layer, values in enumerate(stored):
        cache.write(layer, where, values)
    held = set()
    for slots, length in [(3, 40), (20, 40), (3, 200), (3, 10), (20, 300), (3, 6), (20, 300), (3, 6)]:
        cache.reserve(slots, length)
        held.add(cache.nbytes)
        for layer, (keys, values) in enumerate(cache.views(3)):
            both = torch.stack([keys, values]).view(2, 3, 2, cache.capacity, 8)
            wanted = torch.zeros_like(both)
            for slot, n in lengths.items():
                wanted[:, slot, :, n - 1] = stored[layer][slot].view(2, 2, 8)
            assert torch.equal(both, wanted)
    before = cache.nbytes
    cache.reserve(20, 300)
    assert cache.nbytes == before == max(held)
