"""`slime samples`: the samples of a run in the terminal: prompt, response, reward, and why."""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from slime_core.cli.arguments import no_run
from slime_core.errors import ConfigError, Problem
from slime_core.rundir.records import read_records
from slime_core.rundir.rundir import RunDir

DESCRIPTION = """Print samples of a run: prompt, response, reward, and why. Reads RUN_FOLDER/rollouts, also while the run goes
on or after a crash. Without --sort they come step by step, in the order of the files, and no more is read than is shown."""

#: What is left of a control character: it would move the cursor or change the colours of a terminal.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
#: Columns where the output is no terminal.
_WIDTH = 100

Row = dict[str, Any]


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    arguments = _parse(argv)
    files = _files(arguments)
    key = _reward_key(arguments.run, evaluation=arguments.eval)
    rows: Iterator[Row] = (
        row
        for step, path in files
        for row in _rows(step, path, columns=arguments.json)
        if _is_wanted(row, arguments) and _is_between(_reward(row, key), arguments)
    )
    most = arguments.limit or None
    if arguments.sort in ("reward", "length"):
        sign = -1.0 if arguments.descending else 1.0
        order = _orders(arguments.sort, key, sign)
        rows = iter(heapq.nsmallest(most + 1, rows, key=order) if most else sorted(rows, key=order))
    found = list(itertools.islice(rows, most and most + 1))
    is_more = most is not None and len(found) > most
    found = found[:most]
    if arguments.json:
        for row in found:
            print(json.dumps(row))
        return 0
    console = _console()
    for row in found:
        _show(console, row, _reward(row, key))
    print(_footer(len(found), is_more=is_more, n_files=len(files), arguments=arguments))
    return 0


def _files(arguments: argparse.Namespace) -> list[tuple[int, Path]]:
    """Return (step, file) of the samples that are asked for, in the order of reading.

    Raises:
        ConfigError: there is no such run, or no such step; says what there is.
    """
    folder: Path = arguments.run
    part = "eval_" if arguments.eval else "dropped_" if arguments.dropped else ""
    if not os.path.isdir(folder / "rollouts"):
        raise ConfigError([no_run("slime samples", folder, lacks="rollouts")])
    found = RunDir(folder).rollout_files(part)
    kind = "evaluations after steps" if arguments.eval else "steps"
    kind += " that dropped groups" if arguments.dropped else ""
    there = f"{kind} {ranges(list(found))}" if found else f"no {kind.split()[0]} yet"
    wanted = [max(found, default=0) if step == "last" else step for step in arguments.step or found]
    missing = [step for step in wanted if step not in found]
    if missing or not found:
        asked = f"step {ranges(sorted(missing))}" if missing else there
        other = "drop --eval for those that were trained on" if arguments.eval else "--eval shows evaluations"
        raise ConfigError([Problem(str(folder), asked, f"one that is there: {there}", other)])
    return [(step, found[step]) for step in sorted(set(wanted), reverse=_is_backwards(arguments))]


def ranges(numbers: list[int]) -> str:
    """Return numbers as ranges: `1 to 3, 7`."""
    groups = [
        list(group) for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    ends = [(group[0][1], group[-1][1]) for group in groups]
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in ends)


def _rows(step: int, path: Path, *, columns: bool) -> Iterator[Row]:
    """Yield the samples of a file one by one; a line that a crash cut off is named on standard error and left out."""
    for sample in read_records(path, columns=columns):
        yield {"step": step} | sample | {"step": step}


def _is_wanted(row: Row, arguments: argparse.Namespace) -> bool:
    is_failed = row.get("failure") is not None or row.get("status") == "failed"
    return (is_failed or not arguments.failed) and arguments.group in (None, row.get("group_index"))


def _is_between(reward: float | None, arguments: argparse.Namespace) -> bool:
    below, above = arguments.reward_below, arguments.reward_above
    if below is None and above is None:
        return True
    return reward is not None and (below is None or reward < below) and (above is None or reward > above)


def _is_backwards(arguments: argparse.Namespace) -> bool:
    return arguments.sort == "step" and bool(arguments.descending)


def _orders(sort: str, key: str, sign: float) -> Any:
    """Return the key of the order; samples without a reward come last in both directions."""

    def order(row: Row) -> tuple[bool, float]:
        value = _reward(row, key) if sort == "reward" else _number(row.get("response_length"))
        return (value is None or math.isnan(value), sign * (value or 0.0))

    return order


def _reward_key(run: Path, *, evaluation: bool) -> str:
    """Return which part of a reward with parts counts in the run."""
    try:
        reward = RunDir(run).read_config().get("reward", {})
    except (OSError, ConfigError):
        return "score"
    keys = ("eval_reward_key", "reward_key") if evaluation else ("reward_key",)
    given = (str(reward[key]) for key in keys if reward.get(key, "none") != "none")
    return next(given, "score")


def _reward(row: Row, key: str) -> float | None:
    value = row.get("reward")
    return _number(value.get(key) if isinstance(value, dict) else value)


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _show(console: Console, row: Row, reward: float | None) -> None:
    """Print a sample: a line of what it is, then its texts."""
    shown = "none" if reward is None else f"{reward:g}"
    facts = [
        f"step {row['step']}",
        f"group {row.get('group_index')}",
        f"sample {row.get('index')}",
        f"reward {shown}",
        f"{row.get('response_length')} tokens",
        str(row.get("status")),
    ]
    table = Table.grid(padding=(0, 1), expand=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    texts = {"prompt": _prompt(row.get("prompt")), "response": str(row.get("response"))}
    texts |= {"label": str(row["label"])} if row.get("label") is not None else {}
    why = _why(row)
    texts |= {"why": why} if why else {}
    for name, text in texts.items():
        table.add_row(name, Text(_visible(text.rstrip())))
    console.print(Rule(Text(" · ".join(facts)), align="left"))
    console.print(table)
    console.print()


def _visible(text: str) -> str:
    """Return text without what a terminal would obey, and without halves of characters, which cannot be printed."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").translate(_VISIBLE)


def _prompt(prompt: Any) -> str:
    """Return a prompt as text: a conversation one message a line."""
    if isinstance(prompt, list):
        return "\n".join(
            f"{message.get('role')}: {message.get('content')}" if isinstance(message, dict) else str(message)
            for message in prompt
        )
    return str(prompt)


def _why(row: Row) -> str:
    """Return what failed, and what the reward says beside its number."""
    said = [f"{key}: {row[key]}" for key in ("dropped",) if row.get(key) is not None]
    said += [] if row.get("failure") is None else [str(row["failure"])]
    reward = row.get("reward")
    if isinstance(reward, dict):
        details = reward.get("details")
        parts = {key: value for key, value in reward.items() if key not in ("score", "details")}
        parts |= details if isinstance(details, Mapping) else {} if details is None else {"details": details}
        said += [
            f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in parts.items()
        ]
    return "\n".join(said)


def _footer(n: int, *, is_more: bool, n_files: int, arguments: argparse.Namespace) -> str:
    where = f"{n_files} {'file' if n_files == 1 else 'files'} of {arguments.run}"
    if n == 0:
        hint = "; --reward-below 1 shows those with a low reward" if arguments.failed else ""
        return f"no sample of {where} is as asked{hint}"
    return f"{n} samples of {where}" + ("; there are more: --limit 0 shows all" if is_more else "")


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"found {text[:60]!r}; wanted a whole number, 0 or more")
    return int(text)


def _bound(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"found {text[:60]!r}; wanted a number")
    return value


def _step(text: str) -> int | str:
    if text == "last":
        return text
    if not re.fullmatch("[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"found {text[:60]!r}; wanted a number, or last")
    return int(text)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime samples", description=DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("run", metavar="RUN_FOLDER", type=Path, help="folder of a run, or of an evaluation")
    add("--step", nargs="+", type=_step, metavar="N", help="of these steps alone: numbers, or last")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--eval",
        action="store_true",
        help="of evaluations, not those that were trained on; step 0 is before training",
    )
    kinds.add_argument(
        "--dropped",
        action="store_true",
        help="of groups that a filter dropped, with the reason; they were not trained on",
    )
    add("--failed", action="store_true", help="that could not be generated or scored")
    add("--reward-below", type=_bound, metavar="X", help="with a reward of less than X")
    add("--reward-above", type=_bound, metavar="X", help="with a reward of more than X")
    add("--group", type=_count, metavar="N", help="of one prompt: the group's number")
    add("--sort", choices=("reward", "length", "step"), help="smallest first")
    add("--descending", action="store_true", help="largest first")
    add("--limit", type=_count, default=10, metavar="N", help="print at most N samples (10); 0 for all")
    add("--json", action="store_true", help="one JSON object a line, with all fields")
    arguments = parser.parse_args(argv)
    if arguments.descending and arguments.sort is None:
        parser.error("argument --descending: found it alone; wanted --sort reward, length or step beside it")
    return arguments
