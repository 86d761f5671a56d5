"""`slime bench controller`: what a step costs beside its engine and its trainer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import platform
import sysconfig
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from slime_bench.controller.balance import Division, divisions
from slime_bench.controller.step import Measured, Shape, measure

#: Steps before those that are timed: only from the fourth one on the memory of columns and of files is used again.
_WARM_UP = 3


def controller(argv: list[str]) -> int:
    """Measure a step with an engine that answers at once and a trainer that learns nothing, on one core.

    Samples a second stage by stage, and whole as the loop takes it; the peak of memory beside the arrays that there must be; how the
    time grows with the number of samples; and how evenly and fast ragged samples are divided among ranks, beside verl's
    partitioner if it is installed. Both ways and each number of samples have a process of their own, whose first step is told apart.
    """
    arguments = _parse(argv)
    shape = Shape(
        prompts=arguments.prompts,
        samples=arguments.samples,
        tokens=arguments.tokens,
        optimizer_steps=arguments.optimizer_steps,
        ranks=arguments.ranks,
    )
    stages, whole = (_in_process(shape, how, arguments.steps, _WARM_UP) for how in ("stages", "whole"))
    grown = [
        dataclasses.replace(shape, prompts=max(1, n // shape.samples), tokens=arguments.growth_tokens)
        for n in arguments.growth
    ]
    times = [(each.n_samples, _in_process(each, "stages", 1, 1)) for each in grown]
    shares = divisions(arguments.ragged, arguments.ranks)
    result: dict[str, Any] = {
        "interpreter": interpreter(),
        "shape": dataclasses.asdict(shape),
        "stages": dataclasses.asdict(stages),
        "whole": dataclasses.asdict(whole),
        "growth": {
            "tokens": arguments.growth_tokens,
            "seconds": {n: sum(measured.cpu_s.values()) for n, measured in times},
            "exponent": exponent([(n, sum(measured.cpu_s.values())) for n, measured in times]),
        },
        "divisions": [dataclasses.asdict(share) for share in shares],
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(shape, stages, whole, result["growth"], shares)
    return 0


def exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Return the exponent e of seconds ~ n^e that fits (n, seconds) best, by least squares of logarithms; None of one point."""
    x, y = [math.log(n) for n, _ in points], [math.log(seconds) for _, seconds in points]
    if len(set(x)) < 2:
        return None
    mean_x, mean_y = fmean(x), fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def interpreter() -> str:
    """Say which Python runs, and whether it was built to be fast: without profile-guided optimization it takes up to twice as long."""
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    built = "with" if "--enable-optimizations" in options else "without"
    return f"{platform.python_implementation()} {platform.python_version()}, built {built} --enable-optimizations"


def _in_process(shape: Shape, how: str, n_timed: int, n_before: int) -> Measured:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (shape, how, n_timed, n_before))


def _print(
    shape: Shape, stages: Measured, whole: Measured, growth: dict[str, Any], shares: Sequence[Division]
) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{shape.prompts} prompts x {shape.samples} samples x {shape.tokens} tokens, {shape.optimizer_steps} optimizer steps, "
        "one core; CPU seconds are those that the process was on its core"
    )
    console.print(interpreter())
    table = Table(
        "stage", "samples/s", "µs/sample", "CPU µs/sample", box=None, pad_edge=False, header_style="bold"
    )
    rows = [(name, seconds, stages.cpu_s[name]) for name, seconds in stages.wall_s.items()]
    beside = [name for name in stages.wall_s if name != "generate"]
    rows.append(
        (
            "all stages but generate",
            sum(stages.wall_s[name] for name in beside),
            sum(stages.cpu_s[name] for name in beside),
        )
    )
    rows.append(("all stages", sum(stages.wall_s.values()), sum(stages.cpu_s.values())))
    rows.append(("whole step, by the loop", whole.wall_s["whole"], whole.cpu_s["whole"]))
    n = shape.n_samples
    for name, wall, cpu in rows:
        table.add_row(name, f"{n / wall:,.0f}", f"{wall / n * 1e6:.1f}", f"{cpu / n * 1e6:.1f}")
    console.print(table)
    for name, each in (("stages", stages), ("whole step", whole)):
        first = sum(each.first_cpu_s.values())
        console.print(f"first step, {name}: {n / first:,.0f} samples/s, {first / n * 1e6:.1f} CPU µs/sample")
        if each.peak_bytes is not None:
            console.print(
                f"peak memory, {name}: {each.peak_bytes / 2**20:,.0f} MiB, {each.peak_bytes / each.raw_bytes:.2f} times the raw "
                f"arrays ({each.raw_bytes / 2**20:,.0f} MiB)"
            )
    told = ", ".join(f"{size:,} in {seconds:.1f} s" for size, seconds in growth["seconds"].items())
    fitted = "" if growth["exponent"] is None else f"; exponent {growth['exponent']:.3f}"
    console.print(f"growth, {growth['tokens']} tokens a sample: {told} (CPU){fitted}")
    table = Table(
        "division among ranks", "seconds", "over the bound", box=None, pad_edge=False, header_style="bold"
    )
    for share in shares:
        table.add_row(share.name, f"{share.seconds:.2f}", f"{share.over_bound:.4%}")
    console.print(table)
    if not any(share.name.startswith("verl") for share in shares):
        console.print("verl is not installed: README.md of slime-bench says how to put it beside")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench controller", description=controller.__doc__)
    add = parser.add_argument
    add("--prompts", type=int, default=1000)
    add("--samples", type=int, default=16, help="samples of each prompt")
    add("--tokens", type=int, default=1000, help="response tokens of each sample")
    add("--optimizer-steps", type=int, default=4, help="optimizer steps that a step's samples are cut into")
    add("--ranks", type=int, default=64, help="data-parallel ranks")
    add(
        "--steps",
        type=int,
        default=5,
        help=f"steps that are timed, after {_WARM_UP} others; what is told is their mean",
    )
    add(
        "--growth",
        type=int,
        nargs="+",
        default=[16_000, 128_000, 1_024_000],
        metavar="N",
        help="numbers of samples at which the time is measured, to see how it grows",
    )
    add(
        "--growth-tokens",
        type=int,
        default=16,
        help="response tokens of each of these, few for the memory's sake",
    )
    add(
        "--ragged",
        type=int,
        default=100_000,
        metavar="N",
        help="ragged samples that are divided among the ranks",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)
