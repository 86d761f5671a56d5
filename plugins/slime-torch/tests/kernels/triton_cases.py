"""Kernels of Triton against PyTorch's operators: `test_triton_kernels.py` runs these tests, on a CPU in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from slime_torch.kernels import triton_operators
from slime_torch.layers import builder
from slime_torch.layers.batch import Batch
from slime_torch.layers.norm import Norm
from slime_torch.layers.torch_attention import TorchAttention
from slime_torch.layers.triton_attention import TritonAttention
from slime_torch.storage.cache import KvCache
from torch.nn import functional as F

from ..layers.test_attention_at_once import decoder, states

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: The interpreter multiplies no matrices of bfloat16.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        yield


def caches(lengths, *, groups, dim, dtype, page_len=4):
    """A cache of random keys and values, and the pages of slots of these lengths, in no order; page 0 is nobody's."""
    needed = [-(-length // page_len) for length in lengths]
    order = (1 + torch.randperm(sum(needed))).tolist()
    pages = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int64)
    for slot, n in enumerate(needed):
        pages[slot, :n] = torch.tensor([order.pop() for _ in range(n)])
    cache = KvCache(1, heads=groups, dim=dim, page_len=page_len, dtype=dtype, device=DEVICE)
    cache.reserve(len(lengths), 1 + sum(needed))
    cache.layer(0).normal_()
    return cache, pages


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("window", "has_sinks", "dtype", "dim"),
    [
        (0, False, torch.float32, 16),
        (0, True, torch.float32, 24),
        (5, True, torch.float32, 32),
        (3, False, HALF, 16),
    ],
)
def test_attention_over_pages_is_that_of_gathered_keys(splits, window, has_sinks, dtype, dim):
    torch.manual_seed(0)
    lengths, queries, groups = [1, 9, 300, 64], 6, 2
    cache, pages = caches(lengths, groups=groups, dim=dim, dtype=dtype)
    heads = torch.randn(len(lengths), queries + 2 * groups, dim).to(dtype)
    sinks = torch.randn(queries) if has_sinks else None
    positions = torch.tensor(lengths) - 1
    found = triton_operators.attend_pages(heads, cache.layer(0), positions, pages, sinks, 0.3, window, splits)
    keys, values = (plane.double() for plane in cache.gathered(0, pages))
    for slot, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        k, v = (x[slot, :, first:length].repeat_interleave(queries // groups, 0) for x in (keys, values))
        scores = 0.3 * (heads[slot, :queries, None].double() * k).sum(-1)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None].double()), -1)
            v = F.pad(v, (0, 0, 0, 1))
        wanted = (scores.softmax(-1)[..., None] * v).sum(1).flatten()
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
        torch.testing.assert_close(found[slot].double(), wanted, **tolerance)


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dim", [16, 24])
def test_heads_are_normed_rotated_and_stored(has_norms, dim):
    torch.manual_seed(0)
    n, queries, groups, epsilon = 3, 4, 2, 1e-6
    cache, pages = caches([7, 3, 9], groups=groups, dim=dim, dtype=torch.float32)
    before = cache.layer(0).clone()
    heads = torch.randn(n, queries + 2 * groups, dim)
    angles = torch.randn(10, dim // 2)
    cosine, sine = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    weights = [torch.rand(dim) for _ in range(2)] if has_norms else [None, None]
    positions = torch.tensor([6, 2, 8])
    page, inside = pages[torch.arange(n), positions // 4], positions % 4
    placed = heads.clone()
    triton_operators.place_heads(
        placed, cache.layer(0), cosine, sine, *weights, epsilon, positions, page, inside
    )
    wanted = heads.clone()
    for span, weight in zip((slice(queries), slice(queries, queries + groups)), weights, strict=True):
        x = wanted[:, span]
        if weight is not None:
            x = F.rms_norm(x, (dim,), weight, epsilon)
        first, second = x.chunk(2, -1)
        c, s = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
        wanted[:, span] = torch.cat((first * c - second * s, second * c + first * s), -1)
    torch.testing.assert_close(placed, wanted, rtol=1e-5, atol=1e-6)
    after = before
    for token in range(n):
        for plane in range(2):
            rows = wanted[token, queries + plane * groups : queries + (plane + 1) * groups]
            after[plane, page[token], :, inside[token]] = rows
    torch.testing.assert_close(cache.layer(0), after, rtol=1e-5, atol=1e-6)


def test_heads_are_normed_with_the_epsilon_of_their_norms():
    torch.manual_seed(0)
    n, queries, groups, dim = 3, 4, 2, 16
    cache, pages = caches([7, 3, 9], groups=groups, dim=dim, dtype=torch.float32)
    sizes = SimpleNamespace(
        num_attention_heads=queries, num_query_groups=groups, head_dim=dim, norm_epsilon=1e-6
    )
    norms = [Norm(name, (dim,), epsilon=0.3, dtype=torch.float32, device=DEVICE) for name in "qk"]
    for norm, name in zip(norms, "qk", strict=True):
        norm.write({name: torch.rand(dim)})
    unturned = torch.ones(10, dim), torch.zeros(10, dim)
    attention = TritonAttention(TorchAttention(sizes, tables=unturned, norms=[tuple(norms)]))
    heads = torch.randn(n, queries + 2 * groups, dim)
    wanted = heads.clone()
    for span, norm in zip((slice(queries), slice(queries, queries + groups)), norms, strict=True):
        wanted[:, span] = F.rms_norm(heads[:, span], (dim,), norm.weight, 0.3)
    batch = Batch(torch.tensor([6, 2, 8]), torch.arange(n), pages, 4)
    attention.begin(batch, cache).place(0, heads)
    torch.testing.assert_close(heads, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "glm4", "qwen3_next", "gpt_oss", "minimax_m2", "qwen3_moe", "windows"]
)
def test_a_decoder_with_kernels_gives_what_one_without_gives(kind):
    """Norms of heads, part of a head rotated, other kinds of layers beside, sinks, windows."""
    with torch.device("cpu"):
        with mock.patch.multiple(builder, can_launch=lambda _: True, can_compile=lambda: False):
            without, model = (decoder(kind, DEVICE, with_kernels=has) for has in (False, True))
        without = states(without)
        with mock.patch.object(
            TritonAttention, "begin", autospec=True, side_effect=TritonAttention.begin
        ) as begun:
            having = states(model)
    assert begun.called
    torch.testing.assert_close(having, without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [300, 5000])
def test_the_largest_logit_of_each_block_and_the_sum_of_their_exponentials(columns):
    torch.manual_seed(0)
    logits, temperatures = torch.randn(3, columns) * 5, torch.tensor([1.0, 0.5, 2.0])
    logits[0, :256] = -torch.inf  # a whole block that top-k has dropped
    maxima, sums = triton_operators.block_sums(logits, temperatures, 256)
    blocks = -(-columns // 256)
    tempered = F.pad(
        logits.double() / temperatures[:, None].double(), (0, blocks * 256 - columns), value=-torch.inf
    )
    wanted = tempered.view(3, blocks, 256)
    torch.testing.assert_close(maxima, wanted.amax(-1).float())
    assert sums[0, 0] == 0
    total = maxima.double() + sums.double().log()
    torch.testing.assert_close(total, wanted.logsumexp(-1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("programs", "longest", "splits"),
    [(512, 4096, 1), (8, 4096, 32), (64, 4096, 8), (8, 128, 1), (8, 300, 2), (300, 4096, 1)],
)
def test_keys_are_split_where_there_are_few_programs(programs, longest, splits):
    assert triton_operators.splits_for(programs, longest, multiprocessors=132) == splits
