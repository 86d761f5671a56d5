"""The cache keeps what it holds, whatever its size."""

from __future__ import annotations

import torch
from slime_torch.storage.cache import KvCache

CPU = torch.device("cpu")
RANDOM = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


def test_the_cache_keeps_what_it_holds_whatever_its_size_and_allocates_no_more(monkeypatch):
    cache = KvCache(3, heads=2, dim=8, max_slots=32, dtype=torch.float32, device=CPU)
    cache.reserve(3, 5)
    lengths = {0: 5, 1: 3, 2: 4}
    # Of each layer: one token's keys and values for each of 3 slots.
    stored = [randn(3, 4, 8) for _ in range(3)]
    where = cache.rows(torch.arange(3), torch.tensor([length - 1 for length in lengths.values()]))
    for layer, values in enumerate(stored):
        cache.write(layer, where, values)

    def check(slots, length):
        cache.reserve(slots, length)
        for layer, (keys, values) in enumerate(cache.views(3)):
            both = torch.stack([keys, values])
            wanted = torch.zeros_like(both)
            for slot, n in lengths.items():
                wanted[:, slot, :, n - 1] = stored[layer][slot].view(2, 2, 8)
            assert torch.equal(both, wanted)

    for slots, length in [(3, 40), (20, 40), (3, 200), (3, 10), (20, 300), (3, 6), (20, 300)]:
        check(slots, length)
    # The longest has been seen: every layer's buffer and the spare one fit.
    monkeypatch.setattr(torch, "empty", None)
    for slots, length in [(3, 6), (20, 300), (3, 40), (20, 200), (20, 300)]:
        check(slots, length)
