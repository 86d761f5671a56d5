"""Compiled kernels, and doing without them."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys

import pytest
import torch
from slime_core.protocols import SamplingParams
from slime_models.jit import has_numba
from slime_torch.kernels.launch import can_compile


def made(model, *, kernels: bool, dtype: torch.dtype = torch.float32):
    """Return whether an engine has kernels, and what it answers."""
    prompts = model.prompts(6, seed=3)

    async def run():
        async with model.serving(kernels=kernels, dtype=dtype) as engine:
            params = [SamplingParams(max_new_tokens=12, seed=i) for i in range(6)]
            answers = [engine.generate(p, q) for p, q in zip(prompts, params, strict=True)]
            return engine.model.has_kernels, await asyncio.gather(*answers)

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["llama", "llama-rope3", "qwen2", "qwen3"])
def test_an_engine_samples_the_same_with_kernels_as_without(tiny, kind):
    (has, ours), (has_none, plain) = (made(tiny(kind), kernels=kernels) for kernels in (True, False))
    assert has and not has_none
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in plain]
    for one, other in zip(ours, plain, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_bfloat16_kernels_are_as_near_to_float32_as_pytorch_is(tiny):
    model, error = tiny("llama"), {}
    for kernels in (True, False):
        _, answers = made(model, kernels=kernels, dtype=torch.bfloat16)
        wanted = [
            model.log_probs(p, a.tokens) for p, a in zip(model.prompts(6, seed=3), answers, strict=True)
        ]
        found = torch.tensor([a.log_probs for a in answers])
        error[kernels] = (found - torch.tensor(wanted)).abs().mean().item()
    assert error[True] < 1.25 * error[False]


def test_without_numba_nothing_is_compiled_and_nothing_of_it_imported(tiny, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else find(name))
    monkeypatch.setattr("slime_torch.layers.builder.can_launch", lambda _: False)
    cached = can_compile, has_numba
    for function in cached:
        function.cache_clear()
    try:
        has, answers = made(tiny("llama"), kernels=True)
    finally:
        for function in cached:
            function.cache_clear()
    assert not has
    assert all(answer.tokens for answer in answers)


def test_kernels_are_not_imported_where_they_are_not_used():
    code = "import sys, slime_torch.engine; assert not {'numba', 'llvmlite'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
