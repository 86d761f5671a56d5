"""`slime bench graders`: where other libraries' graders differ from ours over cases decided by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from slime_core.errors import ConfigError, DataError, Problem
from slime_core.plugins.registry import Registry
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import Reward, RewardFailure
from slime_core.sample import Sample

from slime_bench.peer_graders import PEERS


def graders(argv: list[str]) -> int:
    """Grade every case by ours and by its peers, and count who agrees with the verdict decided by hand.

    Each case is a JSON line with grader, label, response, verdict and kind; `packages/slime-rm/tests/verdicts.jsonl`
    holds ours. Exit status 1 when one of ours differs from its verdict.
    """
    arguments = _parse(argv)
    cases = _cases(arguments.cases)
    registry = Registry.from_environment()
    console = Console(soft_wrap=True, highlight=False)
    table = Table(
        "grader",
        "cases",
        "as decided",
        "otherwise",
        "no verdict",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    ours_wrong = 0
    differences: list[str] = []
    for name in sorted({case["grader"] for case in cases}):
        mine = [case for case in cases if case["grader"] == name]
        results = asyncio.run(_graded(registry.find("slime.rewards", name).value, mine))
        ours_wrong += _row(table, f"slime {name}", mine, results, differences)
    for peer in arguments.peer or [name for name, entry in PEERS.items() if _installed(entry[1])]:
        grader, distribution, reference = PEERS[peer]
        given = [case for case in cases if case["grader"] == grader and not case.get("options")]
        results = asyncio.run(_graded(reference, given))
        _row(table, f"{peer} {version(distribution)}", given, results, differences)
    console.print(table)
    if arguments.show:
        console.print(
            f"\nThe first {min(arguments.show, len(differences))} of {len(differences)} differences:"
        )
        for line in differences[: arguments.show]:
            console.print(line, markup=False)
    return 1 if ours_wrong else 0


def _row(
    table: Table,
    name: str,
    cases: Sequence[dict[str, Any]],
    results: Sequence[Reward | RewardFailure],
    differences: list[str],
) -> int:
    """Add a grader's row; returns how many of its results are not the verdict."""
    agree = silent = 0
    for case, result in zip(cases, results, strict=True):
        score = None if isinstance(result, RewardFailure) else result.score
        if score is not None and abs(score - case["verdict"]) < 1e-9:
            agree += 1
            continue
        silent += score is None
        found = "no verdict" if score is None else f"{score:g}"
        differences.append(
            f"{name}: {found}, decided {case['verdict']:g}: label {case['label'][:60]!r}, "
            f"response {case['response'][:80]!r} ({case['kind']})"
        )
    otherwise = len(cases) - agree - silent
    table.add_row(name, str(len(cases)), str(agree), str(otherwise), str(silent))
    return otherwise + silent


async def _graded(reference: str, cases: Sequence[dict[str, Any]]) -> list[Reward | RewardFailure]:
    """Grade cases in a pool: what hangs or crashes has no verdict. Cases with options get pools of their own."""
    results: list[Reward | RewardFailure | None] = [None] * len(cases)
    by_options: dict[str, list[int]] = {}
    for i, case in enumerate(cases):
        by_options.setdefault(json.dumps(case.get("options", {}), sort_keys=True), []).append(i)
    for options, places in by_options.items():
        async with RewardPool(reference, json.loads(options), workers=2, timeout_s=20.0) as pool:
            scored = await asyncio.gather(*(pool.score(_sample(i, cases[i])) for i in places))
        for i, result in zip(places, scored, strict=True):
            results[i] = result
    return [result for result in results if result is not None]


def _sample(index: int, case: dict[str, Any]) -> Sample:
    return Sample(
        index=index, response=case["response"], label=case["label"], metadata=case.get("metadata", {})
    )


def _cases(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: found nothing; wanted cases as JSON lines")
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = {"grader", "label", "response", "verdict", "kind"}
    for number, case in enumerate(cases, start=1):
        if not wanted <= set(case):
            raise DataError(f"{path}:{number}: found the keys {sorted(case)}; wanted {sorted(wanted)}")
    return cases


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench graders", description=graders.__doc__)
    parser.add_argument("cases", type=Path, help="cases as JSON lines")
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="peers; all that are installed")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="differences to print")
    arguments = parser.parse_args(argv)
    missing = [peer for peer in arguments.peer or [] if not _installed(PEERS[peer][1])]
    if missing:
        raise ConfigError(
            [
                Problem(
                    "--peer",
                    ", ".join(missing),
                    "peers that are installed",
                    f"pip install {PEERS[missing[0]][1]}",
                )
            ]
        )
    return arguments
