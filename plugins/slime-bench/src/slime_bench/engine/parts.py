"""The parts of a decoding step, and the speed of the machine's products and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from slime_core.protocols import SamplingParams
from slime_torch.generation.sampling import Draws, sample
from slime_torch.layers.attention import GroupedQueries, GroupedQueryAttention
from slime_torch.layers.batch import Batch
from slime_torch.model.decoder import Decoder
from slime_torch.storage.cache import KvCache
from torch import Tensor

#: Times that a part is run, of which the median counts.
_RUNS = 7


@torch.inference_mode()
def decoding_parts(model: Decoder, *, rows: int, length: int) -> dict[str, float]:
    """Return part -> milliseconds of one decoding step of `rows` sequences that hold `length` tokens each.

    Each part is run alone, on tensors of the step's shapes; `everything else` is what the whole step takes beyond them: the
    embedding, copies between parts, experts, attention of other kinds, and Python.

    Args:
        model: with its weights.
        rows: sequences, one new token each.
        length: tokens in each one's KV cache before the step.
    """
    a, device = model.architecture, model.device
    cache = model.create_cache(rows)
    for slot in range(rows):
        cache.hold(slot, length + 1)
    cache.reserve(rows)
    lengths = torch.full((rows,), length, device=device)
    tokens = torch.arange(rows, device=device) % a.vocab_size
    hidden = model.decode(tokens, lengths, cache)
    logits = model.logits(hidden)
    draws = Draws.of([SamplingParams(max_new_tokens=1)] * rows, range(rows), [length] * rows)
    heads = torch.randn(rows, a.num_attention_heads + 2 * a.num_query_groups, a.head_dim)
    heads = heads.to(device, model.dtype)
    inputs = inputs_of(model, rows)
    batch = Batch(lengths, torch.arange(rows, device=device), cache.pages(rows), cache.page_len)
    begun = {
        kind: kind.begin(batch, store)
        for kind, store in zip(model.kinds, cache.stores, strict=True)
        if isinstance(kind, GroupedQueries) and isinstance(store, KvCache)
    }
    attending = [
        (begun[layer.attention.kind], layer.attention.index)
        for layer in model.layers
        if isinstance(layer.attention, GroupedQueryAttention)
    ]

    def attention() -> None:
        for now, index in attending:
            now.attend(index, heads)

    def norms() -> None:
        for layer in model.layers:
            layer.input_norm(hidden)
            layer.mlp_norm(hidden)

    def placing() -> None:
        for now, index in attending:
            now.place(index, heads)

    parts: dict[str, Callable[[], Any]] = {
        "matrix products": lambda: products(model, inputs),
        "attention": attention,
        "norms": norms,
        "rotary, cache writes": placing,
        "sampling": lambda: sample(logits, draws),
    }

    def whole() -> None:
        sample(model.logits(model.decode(tokens, lengths, cache)), draws)

    took = {name: 1e3 * _seconds(part, device) for name, part in parts.items()}
    step = 1e3 * _seconds(whole, device)
    return took | {"everything else": max(0.0, step - sum(took.values())), "whole step": step}


def products(model: Decoder, inputs: dict[int, Tensor]) -> None:
    """Multiply by every matrix that all tokens meet once; `inputs` is width -> [rows, width]."""
    for matrix in model.matrices:
        matrix.linear(inputs[matrix.shape[1]])
    model.logits(inputs[model.architecture.hidden_size])


def inputs_of(model: Decoder, rows: int) -> dict[int, Tensor]:
    """Return width -> [rows, width], random, for `products`."""
    widths = {model.architecture.hidden_size, *(matrix.shape[1] for matrix in model.matrices)}
    return {width: torch.randn(rows, width).to(model.device, model.dtype) for width in sorted(widths)}


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
