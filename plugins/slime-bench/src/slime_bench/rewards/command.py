"""`slime bench rewards`: the reward pool beside the grader called inline, and with responses that misbehave."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from slime_core.plugins.registry import Registry
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import RewardFailure
from slime_core.rewards.workers.calling import build_reward, import_reward
from slime_core.samples import Sample

from slime_bench.rewards.traps import KINDS, MARK, Trap


@dataclass(frozen=True)
class Turn:
    """The three ways once, one after the other."""

    inline_s: float
    clean_s: float
    bad_s: float
    clean: list[Any]
    """Results of the pool without responses that misbehave."""
    bad: list[Any]
    """With them."""


def rewards(argv: list[str]) -> int:
    """Measure samples a second: the grader called inline, through the pool, and with responses that misbehave.

    The three take turns; medians and ranges are over the repeats, ratios within each. Exit status 1 when a sample has neither a
    result nor a named failure, or a process is left behind.
    """
    arguments = _parse(argv)
    registry = Registry.from_environment()
    reference = registry.find("slime.rewards", arguments.reward).value
    good = samples(arguments.responses, seed=arguments.seed)
    bad = trapped(good, share=arguments.bad, seed=arguments.seed)
    turns = [_turn(reference, good, bad, arguments) for _ in range(arguments.repeats)]
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{len(good)} responses, reward {arguments.reward}, {arguments.workers} workers on {os.cpu_count()} cores; "
        f"{arguments.bad:.1%} misbehave, deadline {arguments.timeout_s:g} s; median of {len(turns)} (lowest to highest)"
    )
    console.print(_table(turns, len(good)))
    results = [result for turn in turns for result in turn.bad]
    given = bad * len(turns)
    failures = Counter(result.kind for result in results if isinstance(result, RewardFailure))
    graded = [
        *zip(good * len(turns), [r for t in turns for r in t.clean], strict=True),
        *zip(given, results, strict=True),
    ]
    innocent = [
        result.message
        for sample, result in graded
        if isinstance(result, RewardFailure) and "trap" not in sample.metadata
    ]
    orphans = len(marked_processes())
    console.print(
        f"{len(results) - failures.total()} results, {failures.total()} failures {dict(failures)} of "
        f"{sum('trap' in sample.metadata for sample in given)} responses that misbehave; "
        f"{len(innocent)} others failed; {orphans} processes left behind"
    )
    for message in innocent[:5]:
        console.print(f"  {message}", markup=False)
    named = all(
        result.message.startswith(f"{sample.name}: ")
        for sample, result in zip(given, results, strict=True)
        if isinstance(result, RewardFailure)
    )
    return 0 if named and not innocent and not orphans else 1


def _turn(
    reference: str, good: Sequence[Sample], bad: Sequence[Sample], arguments: argparse.Namespace
) -> Turn:
    inline_s = _inline(reference, good)
    clean_s, clean = asyncio.run(_pooled(reference, good, arguments))
    bad_s, results = asyncio.run(_pooled(reference, bad, arguments))
    return Turn(inline_s, clean_s, bad_s, clean, results)


def _table(turns: Sequence[Turn], n: int) -> Table:
    table = Table("", "samples/s", "", box=None, pad_edge=False, header_style="bold")
    for name, seconds in (
        ("inline", [turn.inline_s for turn in turns]),
        ("pool", [turn.clean_s for turn in turns]),
        ("pool, some misbehave", [turn.bad_s for turn in turns]),
    ):
        table.add_row(name, *_spread([n / each for each in seconds], ".0f"))
    table.add_row("pool / inline", *_spread([turn.inline_s / turn.clean_s for turn in turns], ".2f"))
    table.add_row(
        "pool, some misbehave / pool", *_spread([turn.clean_s / turn.bad_s for turn in turns], ".2f")
    )
    return table


def _spread(values: Sequence[float], digits: str) -> tuple[str, str]:
    return f"{median(values):{digits}}", f"({min(values):{digits}} to {max(values):{digits}})"


def samples(n: int, *, seed: int) -> list[Sample]:
    """Return `n` boxed answers: a half written as the label is, a quarter that only mean the same, a quarter wrong."""
    rng = random.Random(seed)
    made = []
    for index in range(n):
        a, b = rng.randrange(2, 99), rng.randrange(2, 99)
        label = rf"\frac{{{a}}}{{{b}}}"
        answer = (label, label, rf"\frac{{{2 * a}}}{{{2 * b}}}", rf"\frac{{{a}}}{{{b + 1}}}")[index % 4]
        response = "Let us see. " * rng.randrange(5, 50) + rf"So it is \boxed{{{answer}}}."
        made.append(Sample(index=index, response=response, label=label))
    return made


def trapped(good: Sequence[Sample], *, share: float, seed: int) -> list[Sample]:
    """Return the samples with a share of them, spread by chance, replaced by ones that misbehave."""
    rng = random.Random(seed + 1)
    places = rng.sample(range(len(good)), round(share * len(good)))
    bad = list(good)
    for number, place in enumerate(places):
        trap = Trap(KINDS[number % len(KINDS)])
        bad[place] = Sample(index=good[place].index, label=good[place].label, metadata={"trap": trap})
    return bad


def marked_processes() -> list[int]:
    """Return the ids of the processes that hanging responses left behind."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if MARK.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _inline(reference: str, good: Sequence[Sample]) -> float:
    score = build_reward(import_reward(reference, {}), {})
    for sample in good[:4]:
        score(sample)  # imports what is imported late
    begin = time.perf_counter()
    for sample in good:
        score(sample)
    return time.perf_counter() - begin


async def _pooled(
    reference: str, given: Sequence[Sample], arguments: argparse.Namespace
) -> tuple[float, list[Any]]:
    pool = RewardPool(
        reference,
        {},
        workers=arguments.workers,
        timeout_s=arguments.timeout_s,
        memory_bytes=int(arguments.memory_gb * 1e9),
    )
    async with pool:
        begin = time.perf_counter()
        results = await asyncio.gather(*(pool.score(sample) for sample in given))
        return time.perf_counter() - begin, results


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench rewards", description=rewards.__doc__)
    parser.add_argument("--responses", type=int, default=10_000)
    parser.add_argument("--reward", default="math", help="reward, by name; takes boxed fractions")
    parser.add_argument("--workers", type=int, default=4 * (os.cpu_count() or 1))
    parser.add_argument("--bad", type=float, default=0.01, help="share of responses that misbehave")
    parser.add_argument("--timeout-s", type=float, default=1.0, help="deadline of one call, seconds")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="most memory of a worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3, help="how often all three are measured in turn")
    if sys.platform != "linux":
        parser.error("needs /proc, to look for processes left behind")
    return parser.parse_args(argv)
