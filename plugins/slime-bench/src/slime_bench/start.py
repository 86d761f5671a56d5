"""`slime bench start`: seconds to a command's first line, and until a bad recipe is refused."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

#: A data file that is not there, so that nothing starts.
_MISSING = ("--data-source-path", "file", "--prompt-data", "there-is-no-such-file.jsonl")


def start(argv: list[str]) -> int:
    """Measure the seconds to a command's first line and to its end, each in a process of its own.

    Beside an interpreter that imports nothing, which nothing can be faster than. The ways take turns; medians and ranges are
    over the repeats. Exit status 1 when a recipe whose data file is missing is not refused.
    """
    arguments = _parse(argv)
    slime = str(Path(sys.executable).with_name("slime"))
    recipe = str(arguments.recipe)
    ways: dict[str, tuple[list[str], int]] = {
        "python that imports nothing": ([sys.executable, "-c", "print()"], 0),
        "slime --help": ([slime, "--help"], 0),
        "slime config show": ([slime, "config", "show", recipe], 0),
        "slime check, data file missing": ([slime, "check", recipe, *_MISSING], 2),
        "slime train, data file missing": ([slime, "train", recipe, *_MISSING], 2),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    wrong = []
    for _ in range(arguments.repeats):
        for name, (command, status) in ways.items():
            first, whole, found = timed(command)
            times[name].append((first, whole))
            if found != status:
                wrong.append(f"{name}: exit status {found}; wanted {status}")
    table = Table("command", "first line, s", "end, s", box=None, pad_edge=False, header_style="bold")
    for name, each in times.items():
        table.add_row(name, *(_shown([pair[i] for pair in each]) for i in (0, 1)))
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{recipe}; median of {arguments.repeats} (lowest to highest)")
    console.print(table)
    for line in dict.fromkeys(wrong):
        console.print(f"[red]{line}[/red]")
    return 1 if wrong else 0


def timed(command: Sequence[str]) -> tuple[float, float, int]:
    """Run a command; returns seconds to its first output on either stream, seconds to its end, and its exit status."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.read(1)
    first = time.perf_counter() - begin
    process.stdout.read()
    status = process.wait()
    return first, time.perf_counter() - begin, status


def _shown(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench start", description=start.__doc__)
    parser.add_argument(
        "recipe", nargs="?", type=Path, default=Path("recipes/quickstart.toml"), help="recipe"
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of each command")
    return parser.parse_args(argv)
