"""`slime bench overlap`: real runs of each loop in turn, with engine and trainer on one core each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from slime_core.errors import RunError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.samples import Sample
from slime_simulator.costs.traces import Lognormal

#: Name -> flags.
LOOPS: dict[str, list[str]] = {
    "sync": ["--loop", "sync"],
    "one-step-off": ["--loop", "one-step-off"],
    "fully-async": ["--loop", "fully-async", "--max-staleness", "2", "--rollout-in-completion-order"],
}
#: Engine -> its flags: one core is for the trainer.
ENGINES: dict[str, list[str]] = {
    "torch": ["--torch-num-threads", "1"],
    "sglang": ["--sglang-max-total-tokens", "20000", "--sglang-max-running-requests", "32"],
}
_IDLE = {"engine": "perf/engine_idle_share", "trainer": "perf/trainer_idle_share"}
_STALENESS = "rollout/staleness/mean"
#: Steps at either end that are not measured: loops generate up to three steps' groups ahead in the first ones, and none in the last.
_ENDS = 3


@dataclass(frozen=True, kw_only=True)
class LoopTimes:
    """What one run took a step, in the median of its measured steps."""

    loop: str
    step_s: float
    samples_per_s: float
    """Over all these steps."""
    engine_idle: float
    trainer_idle: float
    staleness: float


async def as_long_as_drawn(
    ctx: GenerateContext, sample: Sample, params: SamplingParams, *, median: int
) -> Sample:
    """Generate a response whose length is drawn by the sample's number: the same in every loop.

    Args:
        ctx: see `slime_core.protocols.GenerateFn`.
        sample: to fill.
        params: how to sample; its `max_new_tokens` cuts the lengths.
        median: tokens of the median response; one in a hundred has more than ten times as many.
    """
    trace = Lognormal(median=median, p99=10 * median, longest=params.max_new_tokens)
    n = trace.response_tokens(sample.index or 0)
    return await single_turn(
        ctx, sample, dataclasses.replace(params, max_new_tokens=n, min_new_tokens=n, stop=())
    )


def share_of_digits(sample: Sample) -> float:
    """Reward the share of digits: cheap, and different within a group."""
    return sum(letter.isdigit() for letter in sample.response) / max(1, len(sample.response))


def overlap(argv: list[str]) -> int:
    """Train SmolLM2 by each loop in turn, with one thread each for engine and trainer.

    All loops generate responses of the same lengths, which have a long tail. Two cores stand for two devices.
    """
    arguments = _parse(argv)
    taken: dict[str, list[LoopTimes]] = {loop: [] for loop in LOOPS}
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name:
        for _ in range(arguments.repeats):
            for loop in LOOPS:
                taken[loop].append(_run(arguments, loop, Path(name)))
    middle = {loop: _middle(runs) for loop, runs in taken.items()}
    if arguments.json:
        print(json.dumps([asdict(each) for each in middle.values()]))
        return 0
    table = Table(
        "loop", "s/step", "samples/s", "x sync", "engine idle", "trainer idle", "staleness", box=None
    )
    for each in middle.values():
        table.add_row(
            each.loop,
            f"{each.step_s:.2f}",
            f"{each.samples_per_s:.2f}",
            f"{each.samples_per_s / middle['sync'].samples_per_s:.2f}",
            f"{each.engine_idle:.0%}",
            f"{each.trainer_idle:.0%}",
            f"{each.staleness:.2f}",
        )
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{arguments.model} by the engine {arguments.engine} and the trainer megatron, {arguments.prompts} prompts x "
        f"{arguments.samples} samples, median response {arguments.median} tokens, {arguments.steps} steps between {_ENDS} first and {_ENDS} last ones, "
        f"median of {arguments.repeats} runs in turn"
    )
    console.print(table)
    return 0


def _run(arguments: argparse.Namespace, loop: str, folder: Path) -> LoopTimes:
    """Run `slime train`.

    Raises:
        RunError: it failed; shows the end of what it printed.
    """
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input": f"{i} + {i % 7} ="}) + "\n" for i in range(64)))
    given = {
        "hf-checkpoint": arguments.model, "prompt-data": data, "output-dir": folder, "run-name": "overlap",
        "rollout-engine": arguments.engine, "train-backend": "megatron", "num-rollout": arguments.steps + 2 * _ENDS,
        "rollout-batch-size": arguments.prompts, "n-samples-per-prompt": arguments.samples, "save-interval": "none",
        "rollout-max-response-len": 10 * arguments.median, "custom-rm-path": "slime_bench.overlap:share_of_digits",
        "custom-generate-function-path": "slime_bench.overlap:as_long_as_drawn",
        "custom-generate-function-args": json.dumps({"median": arguments.median}), "tracker": "jsonl", "lr": "1e-6",
    }  # fmt: skip
    words = [word for flag, value in given.items() for word in (f"--{flag}", str(value))]
    command = [sys.executable, "-m", "slime_core", "train", *words, *ENGINES[arguments.engine], *LOOPS[loop]]
    ended = subprocess.run(
        [*command, "--no-save-last", "--overwrite"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RunError(f"slime bench overlap: the run by {loop} failed:\n{ended.stderr[-2000:]}")
    lines = (folder / "overlap/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][_ENDS:-_ENDS]
    seconds = [row["perf/step_time"] for row in rows]
    return LoopTimes(
        loop=loop,
        step_s=statistics.median(seconds),
        samples_per_s=len(rows) * arguments.prompts * arguments.samples / sum(seconds),
        staleness=statistics.mean(row.get(_STALENESS, 0.0) for row in rows),
        **{f"{part}_idle": statistics.mean(row[name] for row in rows) for part, name in _IDLE.items()},
    )


def _middle(runs: list[LoopTimes]) -> LoopTimes:
    """Return the run in the middle, by samples a second."""
    return sorted(runs, key=lambda run: run.samples_per_s)[len(runs) // 2]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench overlap", description=overlap.__doc__)
    parser.add_argument("--engine", choices=list(ENGINES), default="sglang")
    parser.add_argument("--model", default="smollm2-135m", help="model folder or name")
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        help="measured steps of each run, between those in which loops fill and drain what they generate ahead",
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    parser.add_argument(
        "--median",
        type=int,
        default=16,
        help="tokens of the median response; the longest has 10 times as many",
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each loop, in turn")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(argv)
