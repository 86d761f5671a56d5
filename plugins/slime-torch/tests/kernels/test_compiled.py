"""Each kernel against its definition in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from slime_torch.layers.batch import Batch
from slime_torch.layers.kernel_attention import KernelAttention
from slime_torch.layers.norm import Norm
from slime_torch.layers.rope import rope_tables
from slime_torch.storage.cache import PAGE_LEN, KvCache

CPU = torch.device("cpu")
PAGE = PAGE_LEN
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def architecture(*, dim: int, group: int, kv_heads: int = 2) -> SimpleNamespace:
    heads = group * kv_heads
    return SimpleNamespace(
        head_dim=dim, rotary_dim=dim, num_attention_heads=heads, num_query_groups=kv_heads, num_layers=2,
        norm_epsilon=1e-5, query_size=heads * dim, rope_theta=10_000.0, rope_scaling=None,
    )  # fmt: skip


def store(a: SimpleNamespace, dtype: torch.dtype) -> KvCache:
    return KvCache(
        a.num_layers, heads=a.num_query_groups, dim=a.head_dim, page_len=PAGE, dtype=dtype, device=CPU
    )


def head_norm(dim: int, dtype: torch.dtype, epsilon: float = 1e-5) -> Norm:
    norm = Norm("w", (dim,), epsilon=epsilon, dtype=dtype, device=CPU, compile_kernel=True)
    norm.write({"w": torch.randn(dim)})
    return norm


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return x [..., dim], float64, normalised by the definition."""
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.epsilon).sqrt() * norm.tensor.double()


def turned(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Return a head [dim], float64, with each pair (d, d + dim / 2) rotated by its angle, as complex numbers."""
    half = len(x) // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [1, 8, 29])
def test_a_norm_divides_each_row_by_its_root_mean_square(dtype, rows):
    torch.manual_seed(rows)
    norm, x = head_norm(96, dtype), torch.randn(rows, 96).to(dtype) * 0.01
    torch.testing.assert_close(norm(x).double(), normed(x.double(), norm), rtol=BOUNDS[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_row_that_is_not_finite_stays_alone(dtype):
    norm, x = head_norm(32, dtype), torch.randn(3, 32).to(dtype)
    clean = norm(x)
    x[1, 5] = torch.nan
    assert norm(x)[1].isnan().all()
    assert torch.equal(norm(x)[::2], clean[::2])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("dim", [16, 64])
def test_heads_are_normalised_and_turned_and_keys_and_values_stored(dtype, with_norms, dim):
    """The norms have an epsilon of their own."""
    torch.manual_seed(dim)
    a = architecture(dim=dim, group=3)
    norms = (head_norm(dim, dtype, 0.3), head_norm(dim, dtype, 0.3)) if with_norms else None
    cosine, sine = (table.to(dtype) for table in rope_tables(a, 50))
    cache = store(a, dtype)
    cache.reserve(8, 17)
    # Two pages of each slot, those with odd numbers first; page 0 is nobody's.
    pages = torch.cat([torch.arange(1, 17, 2), torch.arange(2, 17, 2)]).view(8, 2)
    positions, slots = torch.tensor([0, 7, 49, 7, 3]), torch.tensor([2, 0, 7, 1, 2])
    heads = torch.randn(5, 10, dim).to(dtype)
    wanted = heads.double()
    if norms is not None:
        wanted[:, :6], wanted[:, 6:8] = normed(wanted[:, :6], norms[0]), normed(wanted[:, 6:8], norms[1])
    for row, position in enumerate(positions.tolist()):
        for head in range(8):
            wanted[row, head] = turned(wanted[row, head], position, a.rope_theta)
    attention = KernelAttention(a, tables=(cosine, sine), norms=[None, norms])
    attention.begin(Batch(positions, slots, pages, PAGE), cache).place(1, heads)
    bound = 3 * BOUNDS[dtype]  # the table is rounded, too, and so are normalised heads
    torch.testing.assert_close(heads.double(), wanted, rtol=bound, atol=3 * bound)
    stored = torch.zeros(2, 8, 2, 2 * PAGE, dim, dtype=dtype)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        stored[0, slot, :, position], stored[1, slot, :, position] = heads[row, 6:8], heads[row, 8:]
    for layer, both in enumerate([torch.zeros_like(stored), stored]):
        assert torch.equal(torch.stack(cache.gathered(layer, pages)), both)


def filled(
    a: SimpleNamespace, lengths: list[int], dtype: torch.dtype
) -> tuple[KvCache, torch.Tensor, torch.Tensor]:
    """Return a cache whose slots hold so many random tokens, NaN everywhere else, their pages at random, and random heads."""
    cache, n = store(a, dtype), [-(-length // PAGE) for length in lengths]
    cache.reserve(len(lengths), sum(n) + 1)
    numbers = (torch.randperm(sum(n)) + 1).split(n)
    pages = torch.nn.utils.rnn.pad_sequence(list(numbers), batch_first=True)
    for plane in cache.layer(0).transpose(2, 3):
        plane.fill_(torch.nan)
        for slot, length in enumerate(lengths):
            for i, page in enumerate(numbers[slot]):
                part = plane[page, : length - i * PAGE]
                part.copy_(torch.randn(part.shape))
    heads = torch.randn(len(lengths), a.num_attention_heads + 2 * a.num_query_groups, a.head_dim)
    return cache, pages, (3 * heads).to(dtype)


def attended(
    a: SimpleNamespace, cache: KvCache, pages: torch.Tensor, heads: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    tables = tuple(torch.ones(1, a.head_dim, dtype=cache.dtype) for _ in range(2))
    batch = Batch(torch.tensor(lengths) - 1, torch.arange(len(lengths)), pages[: len(lengths)], PAGE)
    return KernelAttention(a, tables=tables, norms=[None]).begin(batch, cache).attend(0, heads)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (16, 1), (128, 7), (80, 2)])
def test_attention_is_the_softmax_of_the_products_over_what_a_slot_holds(dtype, dim, group):
    torch.manual_seed(dim)
    a, lengths = architecture(dim=dim, group=group), [1, 2, 67, 300, 17]
    cache, pages, heads = filled(a, lengths, dtype)
    out = attended(a, cache, pages, heads, lengths).view(5, -1, dim).double()
    keys_values = cache.gathered(0, pages)
    for slot, length in enumerate(lengths):
        for head in range(group * 2):
            keys, values = (part[slot, head // group, :length].double() for part in keys_values)
            weights = (keys @ heads[slot, head].double() / dim**0.5).softmax(0)
            torch.testing.assert_close(
                out[slot, head], weights @ values, rtol=BOUNDS[dtype], atol=2 * BOUNDS[torch.float32]
            )


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_row_is_the_same_bits_in_any_company(dtype):
    torch.manual_seed(0)
    a, lengths = architecture(dim=64, group=3), [40, 3, 90, 41, 77, 12]
    cache, pages, heads = filled(a, lengths, dtype)
    together = attended(a, cache, pages, heads, lengths)
    for n in range(1, 6):
        assert torch.equal(attended(a, cache, pages, heads[:n].contiguous(), lengths[:n]), together[:n])
    norm, x = head_norm(64, dtype), torch.randn(30, 64).to(dtype)
    assert torch.equal(torch.cat([norm(row[None]) for row in x]), norm(x))
