"""`slime bench engine`: tokens a second of transformers, of the engine `torch`, and of the matrix products alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from slime_core.plugins.registry import Registry
from slime_core.protocols import SamplingParams, Tokenizer
from slime_core.runtime.openmp import release_threads
from slime_models.cpu import describe
from slime_models.hf.config import read_config
from slime_models.hf.fetch import resolve
from slime_torch.engine import DTYPES, TorchEngine, engine_dtype
from slime_torch.model.decoder import Decoder
from slime_torch.section import TorchSection

from slime_bench.engine.parts import decoding_parts, inputs_of, machine_facts, products


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What each contestant generates."""

    prompts: list[list[int]]
    new_tokens: int
    """Tokens a prompt; the end-of-sequence id does not end a response."""

    @property
    def tokens(self) -> int:
        """Tokens generated in all."""
        return len(self.prompts) * self.new_tokens


def main(argv: list[str]) -> int:
    """Measure transformers' `generate`, this engine, and the limit side by side; print a table."""
    args = _arguments(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    path, dtype = resolve(args.model), engine_dtype(args.dtype)
    registry = Registry.from_environment()
    tokenizer = registry.resolve("slime.tokenizers", "hf")(path)
    workload = Workload(prompts=_prompts(tokenizer, args.prompts), new_tokens=args.new_tokens)
    family = registry.resolve("slime.models", read_config(path)["model_type"])
    section = TorchSection(
        max_running_requests=max(args.prompts, 1), kernels=args.kernels, cuda_graphs=args.cuda_graphs
    )
    engine = TorchEngine(path, family, tokenizer, dtype=dtype, section=section)
    device = engine.device
    print(
        f"{path.name}, {str(dtype).removeprefix('torch.')}, {args.prompts} prompts of {len(workload.prompts[0])} tokens or so, "
        f"{args.new_tokens} new tokens each, sampled at temperature 1; {device.type}, {torch.get_num_threads()} threads, "
        f"median of {args.repeats}",
        flush=True,
    )
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        print(
            f"between the products: {'compiled kernels' if engine.model.has_kernels else 'PyTorch'}",
            flush=True,
        )
        contestants = {
            "transformers generate": _transformers(path, dtype, device, workload),
            "slime torch engine": lambda: runner.run(_generate_all(engine, workload)),
            "matrix products alone": _products(engine.model, workload),
        }
        seconds = _measure(contestants, repeats=args.repeats, device=device)
        parts = decoding_parts(
            engine.model,
            rows=args.prompts,
            length=max(map(len, workload.prompts)) + args.new_tokens // 2,
        )
        runner.run(engine.close())
    _report({name: workload.tokens / took for name, took in seconds.items()}, parts, args.json)
    if device.type == "cuda":
        print(
            "\nThe parts were launched kernel by kernel, which a recorded step is not; the first table says how fast that is."
        )
    if device.type == "cpu":
        print(f"\n{describe()}", *machine_facts(), sep="\n")
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench engine", description=__doc__)
    parser.add_argument(
        "--model", default="smollm2-135m", help="folder, or a name that `slime models list` shows"
    )
    parser.add_argument("--prompts", type=int, default=64, help="prompts, all in flight at once")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; each measures everything once")
    parser.add_argument(
        "--dtype",
        choices=["auto", *sorted(DTYPES)],
        default="auto",
        help="of weights and arithmetic, ours and transformers'; auto: what the engine takes on this machine for bfloat16",
    )
    parser.add_argument("--threads", type=int, help="CPU threads; PyTorch's own choice when not given")
    parser.add_argument(
        "--kernels",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use compiled kernels where there are some",
    )
    parser.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="launch decoding steps on a GPU whole, as CUDA graphs, where they can be recorded",
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args(argv)


def _prompts(tokenizer: Tokenizer, n: int) -> list[list[int]]:
    texts = (
        f"Question {i + 1}: what is {37 * i + 11} plus {53 * i + 5}? Think step by step." for i in range(n)
    )
    return [tokenizer.encode(f"{text}\nAnswer:") for text in texts]


def _transformers(path: Path, dtype: torch.dtype, device: torch.device, work: Workload) -> Callable[[], Any]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    model.to(device).eval()
    longest = max(map(len, work.prompts))
    padding = [longest - len(prompt) for prompt in work.prompts]
    ids = torch.tensor([[0] * pad + p for pad, p in zip(padding, work.prompts, strict=True)], device=device)
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=device)
    model.generation_config.eos_token_id = None

    def generate() -> None:
        n = work.new_tokens
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=n,
            do_sample=True,
            # Whatever the folder's generation_config.json says:
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            pad_token_id=0,
        )
        assert out.shape[1] == longest + n

    return generate


async def _generate_all(engine: TorchEngine, work: Workload) -> None:
    n = work.new_tokens
    answers = await asyncio.gather(
        *(
            engine.generate(prompt, SamplingParams(max_new_tokens=n, min_new_tokens=n, seed=seed))
            for seed, prompt in enumerate(work.prompts)
        )
    )
    assert sum(len(answer.tokens) for answer in answers) == work.tokens


def _products(model: Decoder, work: Workload) -> Callable[[], None]:
    """Return the linear layers and the head, nothing else, once for each of the workload's decoding steps."""
    inputs = inputs_of(model, len(work.prompts))

    @torch.inference_mode()
    def multiply() -> None:
        for _ in range(work.new_tokens):
            products(model, inputs)

    return multiply


def _measure(
    contestants: dict[str, Callable[[], Any]], *, repeats: int, device: torch.device
) -> dict[str, float]:
    """Return the median seconds of each, after one round to warm up; rounds go through all of them in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(repeats + 1):
        for name, contestant in contestants.items():
            begin = time.perf_counter()
            contestant()
            if device.type == "cuda":
                torch.cuda.synchronize()
            release_threads()  # those of this thread would slow the engine's down
            if index > 0:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _report(rates: dict[str, float], parts: dict[str, float], json_path: Path | None) -> None:
    base, _, limit = rates.values()
    print(f"\n{'':<24}{'tokens/s':>10}{'x transformers':>16}{'share of limit':>16}")
    for name, rate in rates.items():
        print(f"{name:<24}{rate:>10,.0f}{rate / base:>16.2f}{rate / limit:>16.2f}")
    print(f"\n{'a decoding step, halfway':<24}{'ms':>10}{'share':>10}")
    for name, milliseconds in parts.items():
        print(f"{name:<24}{milliseconds:>10.1f}{milliseconds / parts['whole step']:>10.0%}")
    if json_path is not None:
        figures = {"tokens_per_s": rates, "decoding_step_ms": parts}
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
