"""Where a decoding step's time goes, and what the machine is capable of: so that figures of two machines can be compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from slime_core.protocols import SamplingParams
from torch import Tensor

from slime_torch.cache import KvCache
from slime_torch.model import Decoder
from slime_torch.rope import rotate_
from slime_torch.sampling import Draw, sample

#: Times that a part is run, of which the median counts.
_RUNS = 7


@torch.inference_mode()
def decoding_parts(model: Decoder, *, rows: int, length: int, dtype: torch.dtype) -> dict[str, float]:
    """Return part -> milliseconds of one decoding step of `rows` sequences that hold `length` tokens each.

    Each part is run alone, on tensors of the step's shapes; `everything else` is what the whole step takes beyond them: the
    embedding, copies between parts, and Python.

    Args:
        model: with its weights.
        rows: sequences, one new token each.
        length: tokens in each one's KV cache before the step.
        dtype: of attention and the KV cache.
    """
    a, device = model.architecture, model.device
    cache = KvCache(a, max_slots=rows, dtype=dtype, device=device)
    cache.reserve(rows, length + 1)
    lengths = torch.full((rows,), length, device=device)
    tokens = torch.arange(rows, device=device) % a.vocab_size
    hidden = model.decode(tokens, lengths, cache)
    logits = model.logits(hidden)
    draws = [Draw(params=SamplingParams(max_new_tokens=1), seed=i, position=length) for i in range(rows)]
    n_layers, n_query = a.num_layers, a.num_attention_heads
    heads = torch.randn(rows, n_query + 2 * a.num_query_groups, a.head_dim).to(device, model.dtype)
    rotated = heads[:, : n_query + a.num_query_groups]
    table = torch.ones(rows, 1, a.head_dim, dtype=model.dtype, device=device)
    queries, keys_values = heads.to(dtype).split([n_query, 2 * a.num_query_groups], dim=1)
    where = cache.rows(torch.arange(rows, device=device), lengths)
    mask = torch.zeros(rows, 1, 1, cache.capacity, dtype=dtype, device=device)
    inputs = {
        width: torch.randn(rows, width).to(device, model.dtype)
        for width in (a.hidden_size, a.query_size, a.ffn_hidden_size)
    }

    def attention() -> None:
        for keys, values in cache.views(rows):
            model.attend_to_cache(queries, keys, values, mask)

    def norms() -> None:
        for layer in model.layers:
            layer.input_norm(hidden)
            layer.mlp_norm(hidden)

    parts: dict[str, Callable[[], Any]] = {
        "matrix products": lambda: products(model, inputs),
        "attention": attention,
        "norms": norms,
        "rotary embedding": lambda: [rotate_(rotated, table, table) for _ in range(n_layers)],
        "KV cache writes": lambda: [cache.write(i, where, keys_values) for i in range(n_layers)],
        "sampling": lambda: sample(logits, draws),
    }

    def whole() -> None:
        sample(model.logits(model.decode(tokens, lengths, cache)), draws)

    took = {name: 1e3 * _seconds(part, device) for name, part in parts.items()}
    step = 1e3 * _seconds(whole, device)
    return took | {"everything else": max(0.0, step - sum(took.values())), "whole step": step}


def products(model: Decoder, inputs: dict[int, Tensor]) -> None:
    """Multiply by every matrix of the model once; `inputs` is width -> [rows, width]."""
    for layer in model.layers:
        for weight in (layer.qkv, layer.output, layer.gate, layer.up, layer.down):
            weight.linear(inputs[weight.shape[1]])
    model.logits(inputs[model.architecture.hidden_size])


def machine_facts() -> list[str]:
    """Return a line each on what threads, memory and short parallel regions of this CPU are good for, measured now."""
    matrix, large = torch.randn(1024, 1024), torch.ones(2**25)
    target, small = torch.empty_like(large), torch.ones(2**16)
    n = torch.get_num_threads()
    rates, copies, short = [], [], []
    for threads in (1, n):
        with _threads(threads):
            rates.append(2 * 1024**3 / _seconds(lambda: matrix @ matrix) / 1e9)
            copies.append(2 * large.nbytes / _seconds(lambda: target.copy_(large)) / 1e9)
            short.append(1e6 * _seconds(lambda: small.add(1.0)))
    return [
        f"float32 product, 1024 x 1024: {rates[0]:,.0f} GFLOP/s with one thread, {rates[1]:,.0f} with {n} "
        f"({rates[1] / rates[0]:.2f} times)",
        f"memory, read and written: {copies[0]:.1f} GB/s with one thread, {copies[1]:.1f} with {n}",
        f"a sum over 256 KiB: {short[0]:.0f} us with one thread, {short[1]:.0f} us with {n}, which have to meet",
    ]


def _seconds(work: Callable[[], Any], device: torch.device | None = None) -> float:
    """Return the median seconds of some runs, after one to warm up."""
    times = []
    for _ in range(_RUNS + 1):
        begin = time.perf_counter()
        work()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """Compute with `n` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
