"""`slime bench step`: one whole GRPO step, its parts, and a peer's step on the same work."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.protocols import Completion, RolloutEngine, SamplingParams
from slime_core.run.assemble import assemble
from slime_core.run.build import resolve_model
from slime_core.run.run import Run
from slime_core.run.start import start
from slime_core.run.tracking import attach

from slime_bench.step.work import prompts

PARTS = ("rollout", "dump", "batch", "train", "update_weights")


class BusyEngine:
    """Passes everything on to an engine, and measures how long at least one request was in flight."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._in_flight = 0
        self._since = 0.0
        self.busy_s = 0.0

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's."""
        return getattr(self._engine, name)

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        """Generate, and count the time."""
        if self._in_flight == 0:
            self._since = time.perf_counter()
        self._in_flight += 1
        try:
            return await self._engine.generate(tokens, params, session_id=session_id)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self.busy_s += time.perf_counter() - self._since


def step(argv: list[str]) -> int:
    """Measure whole GRPO steps: samples a second, the parts of a step, and the share that is neither engine nor trainer.

    With `--peer trl`, TRL's GRPOTrainer does the same work in the same process.
    """
    arguments = _parse(argv)
    registry = Registry.from_environment()
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as folder:
        ours = asyncio.run(_ours(arguments, registry, Path(folder)))
    console = Console(soft_wrap=True, highlight=False)
    samples = arguments.prompts * arguments.samples
    console.print(
        f"{arguments.model}, {arguments.prompts} prompts x {arguments.samples} samples x {arguments.tokens} new tokens, "
        f"median of {arguments.repeats} steps after one warm-up"
    )
    table = Table("part", "seconds", "share", box=None, pad_edge=False, header_style="bold")
    for name, seconds in ours["parts"].items():
        table.add_row(name, f"{seconds:.2f}", f"{seconds / ours['step_s']:.1%}")
    table.add_row("whole step", f"{ours['step_s']:.2f}", "")
    table.add_row(
        "neither engine nor trainer", f"{ours['neither_s']:.2f}", f"{ours['neither_s'] / ours['step_s']:.1%}"
    )
    products_s = _products(arguments, registry)
    table.add_row("its matrix products alone", f"{products_s:.2f}", f"{products_s / ours['step_s']:.1%}")
    console.print(table)
    console.print(f"slime {samples / ours['step_s']:.2f} samples/s")
    if arguments.peer == "trl":
        from slime_bench.step.trl import trl_step

        peer_s = trl_step(
            resolve_model(arguments.model, registry),
            [prompt for _ in range(arguments.repeats + 1) for prompt in prompts(arguments.prompts)],
            n_prompts=arguments.prompts,
            n_samples=arguments.samples,
            n_tokens=arguments.tokens,
        )
        console.print(f"TRL   {samples / peer_s:.2f} samples/s ({peer_s:.2f} s a step)")
        console.print(f"slime / TRL: {peer_s / ours['step_s']:.2f}")
    return 0


def _products(arguments: argparse.Namespace, registry: Registry) -> float:
    """Return the seconds of the matrix products that the measured step cannot do without."""
    from slime_models.hf.config import read_config

    from slime_bench.step.products import StepShape, products_seconds

    folder = resolve_model(arguments.model, registry)
    config = read_config(folder)
    tokenizer = registry.resolve("slime.tokenizers", "hf")(folder)
    lengths = [len(tokenizer.encode(prompt)) for prompt in prompts(arguments.prompts)]
    shape = StepShape(
        prompts=arguments.prompts,
        samples=arguments.samples,
        prompt_tokens=round(statistics.mean(lengths)),
        new_tokens=arguments.tokens,
    )
    return products_seconds(
        registry.resolve("slime.models", config["model_type"]).architecture(config), shape
    )


async def _ours(arguments: argparse.Namespace, registry: Registry, folder: Path) -> dict[str, Any]:
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input": prompt}) + "\n" for prompt in prompts(arguments.prompts)))
    settings = load_settings(
        arguments.recipe,
        [
            "--hf-checkpoint", arguments.model, "--prompt-data", str(data), "--output-dir", str(folder), "--run-name", "step",
            "--rollout-batch-size", str(arguments.prompts), "--n-samples-per-prompt", str(arguments.samples),
            "--rollout-max-response-len", str(arguments.tokens), "--rollout-min-new-tokens", str(arguments.tokens),
            "--custom-rm-path", "slime_bench.step.work:parity", "--num-rollout", "1000", "--tracker", "jsonl",
            "--lr", "1e-6",
        ],
        registry=registry,
    )  # fmt: skip
    run = await assemble(settings, registry)
    engine = BusyEngine(run.engine)
    run.engine = engine  # type: ignore[assignment]  # it passes everything on
    try:
        with contextlib.redirect_stdout(None):
            await start(run)
            attach(registry, run.trackers)
            await run.begin()
            timed = [await _step(run, engine, number) for number in range(1, arguments.repeats + 2)][1:]
    finally:
        await run.close()
    middle = {key: statistics.median(row[key] for row in timed) for key in timed[0]}
    step_s = middle.pop("step")
    neither = statistics.median(row["step"] - row["engine"] - row["train"] for row in timed)
    return {"parts": middle, "step_s": step_s, "neither_s": neither}


async def _step(run: Run, engine: BusyEngine, number: int) -> dict[str, float]:
    """Run one step and return the seconds of its parts; weight sync counts as neither engine nor trainer."""
    engine.busy_s = 0.0
    begin = time.perf_counter()
    groups = await run.rollout(number)
    await run.train(run.batch(number, groups))
    await run.sync_weights(number)
    whole = time.perf_counter() - begin
    await run.end_step(number)
    row = run.run_dir.read_metrics()[-1]
    parts = {part: row[f"perf/{part}_time"] for part in PARTS}
    return parts | {"engine": engine.busy_s, "step": whole}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench step", description=step.__doc__)
    parser.add_argument("recipe", nargs="*", help="recipe with further settings, such as another engine")
    parser.add_argument("--model", default="smollm2-135m", help="model folder or name")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sample")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps")
    parser.add_argument("--peer", choices=["none", "trl"], default="none")
    return parser.parse_args(argv)
