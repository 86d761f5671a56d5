"""The cache keeps what it holds, whatever its size, and has no more memory than it may."""

from __future__ import annotations

import pytest
import torch
from slime_torch.layers.batch import Batch
from slime_torch.storage.cache import Cache, KvCache, StateStore

CPU = torch.device("cpu")
RANDOM = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


def cache(*, max_slots=8, max_len=32, with_state=False, **limits) -> Cache:
    stores = [KvCache(3, heads=2, dim=8, page_len=4, dtype=torch.float32, device=CPU)]
    if with_state:
        stores.append(StateStore(2, parts=[((3,), torch.float32)], device=CPU))
    return Cache(stores, page_len=4, max_slots=max_slots, max_len=max_len, device=CPU, **limits)


def write(tested: Cache, slot: int, since: int, tokens: list[torch.Tensor]) -> None:
    """Write keys and values of tokens, [4, 8] for each of 3 layers each, of a slot from a position on."""
    n = len(tokens)
    positions, slots = torch.arange(since, since + n), torch.full((n,), slot)
    batch = Batch(positions, slots, tested.pages(slot + 1), tested.page_len)
    for layer in range(3):
        tested.stores[0].write(
            layer,
            tested.stores[0].rows(batch.page, batch.inside),
            torch.stack([token[layer] for token in tokens]),
        )


def read(tested: Cache, slot: int, length: int) -> list[torch.Tensor]:
    """Return [2 * 2, 8] for each of 3 layers of each token of a slot."""
    layers = [
        torch.cat(
            [plane[slot, :, :length] for plane in tested.stores[0].gathered(layer, tested.pages(slot + 1))]
        )
        for layer in range(3)
    ]
    return list(torch.stack(layers).permute(2, 0, 1, 3))


def held(tested: Cache, slot: int, length: int) -> list[torch.Tensor]:
    tested.hold(slot, length)
    tested.reserve(slot + 1)
    tokens = [randn(3, 4, 8) for _ in range(length)]
    write(tested, slot, 0, tokens)
    return tokens


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_what_is_held_stays_while_it_grows_and_slots_come_go_and_move():
    tested = cache()
    first, second = held(tested, 0, 5), held(tested, 1, 3)
    third = held(tested, 2, 30)
    assert same(read(tested, 0, 5), first)
    assert same(read(tested, 1, 3), second)
    tested.release(0)
    tested.move(2, 0)
    assert same(read(tested, 0, 30), third)
    fourth = held(tested, 2, 9)
    assert same(read(tested, 0, 30), third)
    assert same(read(tested, 1, 3), second)
    assert same(read(tested, 2, 9), fourth)


@pytest.mark.parametrize("length", [1, 4, 6, 8])
def test_a_shared_prompt_is_the_sources_and_what_follows_is_each_ones_own(length):
    tested = cache()
    source = held(tested, 0, 10)
    page = tested.share(0, 1, length)
    tested.hold(1, length + 1)
    tested.reserve(2)
    tested.copy(0, 1, page)
    own = [randn(3, 4, 8)]
    write(tested, 1, length, own)
    assert same(read(tested, 1, length + 1), source[:length] + own)
    assert same(read(tested, 0, 10), source)


def test_states_go_with_their_slots():
    tested = cache(with_state=True)
    held(tested, 0, 5)
    states = tested.stores[1].layers[1][0]
    states[0] = torch.tensor([1.0, 2.0, 3.0])
    page = tested.share(0, 1, 5)
    tested.reserve(2)
    tested.copy(0, 1, page)
    assert states[1].tolist() == [1, 2, 3]
    tested.release(0)
    states[0] = 0
    tested.move(1, 0)
    assert states[0].tolist() == [1, 2, 3]
    assert not tested.has_prefixes  # a state is that of all tokens


def test_room_is_that_of_the_slots_or_tokens_or_bytes_and_at_least_of_one_request():
    assert cache().max_tokens == 8 * 32
    assert cache(max_tokens=99).max_tokens == 100
    assert cache(max_tokens=5).max_tokens == 32
    # A page has 3 layers, and once more one of them while it grows, of keys and values of 4 tokens, 2 heads, 8 numbers.
    page = 4 * 2 * 4 * 2 * 8 * 4
    assert cache(max_bytes=11 * page).max_tokens == 10 * 4  # and page 0
    tested = cache(max_bytes=11 * page)
    for slot in range(5):
        tested.hold(slot, 8)
        tested.reserve(slot + 1)
        assert tested.nbytes + page // 4 <= tested.predicted_bytes(8, 32) <= 11 * page
    assert (tested.has_room([8] * 5), tested.has_room([9] + [8] * 4), tested.usage) == (True, False, 1.0)


def test_room_for_a_request_is_reckoned_without_what_it_shares_and_with_what_is_spared():
    tested = cache(max_tokens=40)
    tested.hold(0, 30)  # 8 of 10 pages
    assert [tested.fits(length) for length in (8, 9)] == [True, False]
    assert [tested.fits(8, spare=spare) for spare in (0, 1)] == [True, False]
    assert [tested.fits(length, shared=11) for length in (16, 17)] == [True, False]  # two full pages
    tested.clear()
    assert tested.usage == 0
    assert tested.has_room([32, 8])


def test_all_memory_can_be_freed_and_had_again():
    tested = cache(with_state=True)
    held(tested, 0, 20)
    tested.free()
    assert (tested.nbytes, tested.usage) == (0, 0)
    tokens = held(tested, 0, 6)
    assert same(read(tested, 0, 6), tokens)
