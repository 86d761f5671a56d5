"""`slime bench events`: what it costs to take down what a run does and when."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from statistics import median

from slime_core.run.run import Run

from slime_bench.controller.step import Shape, null_run

#: The share of a run that its events may cost.
_SHARE = 0.005


def events(argv: list[str]) -> int:
    """Take steps of two runs in turn in one process, one with events and one without, whose engine and trainer take no time.

    What events cost is CPU time of all threads, writing included, beyond that of the run without; the median of all turns. The
    time is for each sample, whatever its length, so that it is a smaller share of a run the longer a sample takes to generate.
    """
    arguments = _parse(argv)
    shape = Shape(prompts=arguments.prompts, samples=arguments.samples, tokens=arguments.tokens)
    with contextlib.redirect_stdout(None):
        turns = asyncio.run(_in_turns(shape, arguments.turns))
    n = shape.n_samples
    without, extra = (median(each) / n for each in ([b for _, b in turns], [a - b for a, b in turns]))
    result = {
        "samples": n,
        "turns": len(turns),
        "without_us": without * 1e6,
        "events_us": extra * 1e6,
        "samples_per_s_at_half_a_percent": _SHARE / extra if extra > 0 else None,
    }
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(
        f"a step of {n} samples beside engine and trainer, without events: {without * 1e6:.1f} CPU µs a sample"
    )
    print(f"its events: {extra * 1e6:.1f} CPU µs a sample (median of {len(turns)} turns)")
    if extra > 0:
        print(
            f"that is {_SHARE:.1%} of a run that trains on {_SHARE / extra:,.0f} samples a second, and less of a slower one"
        )
    return 0


async def _in_turns(shape: Shape, n_turns: int) -> list[tuple[float, float]]:
    """Return the CPU seconds of a step with events and of one without, of each turn; a first turn warms up."""
    steps, found = n_turns + 1, list[tuple[float, float]]()
    async with (
        null_run(shape, "--events", steps=steps) as told,
        null_run(shape, "--no-events", steps=steps) as untold,
    ):
        for step in range(1, steps + 1):
            pair = (told, untold) if step % 2 else (untold, told)
            seconds = {id(run): await _step(run, step) for run in pair}
            found.append((seconds[id(told)], seconds[id(untold)]))
    return found[1:]


async def _step(run: Run, step: int) -> float:
    begin = time.process_time()
    groups = await run.rollout(step)
    await run.train(run.batch(step, groups))
    await run.sync_weights(step)
    await run.end_step(step)
    run.run_dir.flush()
    run.events.flush()
    return time.process_time() - begin


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench events", description=events.__doc__)
    add = parser.add_argument
    add("--prompts", type=int, default=128)
    add("--samples", type=int, default=16, help="samples of each prompt")
    add("--tokens", type=int, default=256, help="response tokens of each sample")
    add("--turns", type=int, default=15)
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)
