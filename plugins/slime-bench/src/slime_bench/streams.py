"""`slime bench streams`: an SGLang server with streamed answers, as fault tolerance needs them, beside plain ones."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch
from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams
from slime_core.run.build import resolve_model
from slime_models.hf.config import read_config
from slime_sglang.engine import SglangEngine
from slime_sglang.generation.response import PartialResponse
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings


def streams(argv: list[str]) -> int:
    """Measure tokens/s of an SGLang server with plain answers and with streams, the same requests in turn."""
    options = _parse(argv)
    model_path = resolve_model(options.model, Registry.from_environment())
    room = options.requests * (options.prompt_tokens + options.new_tokens)
    arguments = {
        "max_total_tokens": 2 * room,
        "max_running_requests": options.requests,
        "stream_interval": options.stream_interval,
    }
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as folder:
        section = SglangSection(server_args=arguments, server_concurrency=options.requests)
        engine = SglangEngine(
            ServerSettings(model_path=model_path, dtype="bfloat16", section=section, folder=Path(folder))
        )
        vocab_size = int(read_config(model_path)["vocab_size"])
        asyncio.run(_measure(engine, vocab_size, options))
    return 0


async def _measure(engine: SglangEngine, vocab_size: int, options: argparse.Namespace) -> None:
    await engine.start()
    try:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(options.repeats + 1):  # the first warms up
            for stream in (False, True) if repeat % 2 else (True, False):
                prompts = _prompts(vocab_size, options, seed=2 * repeat + stream)
                rates[stream].append(await _tokens_per_s(engine, prompts, options.new_tokens, stream=stream))
    finally:
        await engine.close()
    print(
        f"{options.model}, bfloat16, {options.requests} requests at once, {options.prompt_tokens} tokens each and "
        f"{options.new_tokens} new ones, median of {options.repeats} turns:"
    )
    for stream, name in ((False, "plain"), (True, f"streams, an event for {options.stream_interval} tokens")):
        measured = rates[stream][1:]
        print(
            f"  {statistics.median(measured):8.1f} tokens/s ({min(measured):.1f} to {max(measured):.1f})  {name}"
        )
    ratios = [streamed / plain for plain, streamed in zip(rates[False][1:], rates[True][1:], strict=True)]
    print(
        f"  {statistics.median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f})  streams / plain, turn by turn"
    )


async def _tokens_per_s(engine: SglangEngine, prompts: list[list[int]], n_new: int, *, stream: bool) -> float:
    params = SamplingParams(max_new_tokens=n_new, min_new_tokens=n_new, temperature=1.0)
    responses = [PartialResponse(prompt, params) for prompt in prompts]
    begin = time.perf_counter()
    await asyncio.gather(*(engine.extend(response, stream=stream) for response in responses))
    return n_new * len(responses) / (time.perf_counter() - begin)


def _prompts(vocab_size: int, options: argparse.Namespace, *, seed: int) -> list[list[int]]:
    """Return random prompts, others each time: those of an earlier turn are in the server's cache."""
    generator = torch.Generator().manual_seed(seed)
    shape = (options.requests, options.prompt_tokens)
    rows: list[list[int]] = torch.randint(0, vocab_size, shape, generator=generator).tolist()
    return rows


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench streams", description=streams.__doc__)
    parser.add_argument(
        "--model", default="smollm2-135m", help="Hugging Face folder, hub name, or short name"
    )
    parser.add_argument("--requests", type=int, default=32, help="at once")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of each request")
    parser.add_argument("--new-tokens", type=int, default=64, help="that each request generates")
    parser.add_argument("--stream-interval", type=int, default=32, help="tokens of an event of a stream")
    parser.add_argument("--repeats", type=int, default=3, help="measured turns")
    return parser.parse_args(argv)
