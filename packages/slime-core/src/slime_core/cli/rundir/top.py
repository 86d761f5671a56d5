"""`slime top`: what a run is doing, from the files of its folder."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slime_core.cli.arguments import no_run
from slime_core.errors import ConfigError, Interrupted
from slime_core.rundir.activity import CurrentPhase
from slime_core.rundir.watched_run import WatchedRun

DESCRIPTION = """Show what a run is doing, once a second, until it has ended or you press Ctrl-C: steps and the time left, the phase it is in
and for how long, groups and requests in flight, tokens and samples a second, idle shares, staleness, reward with its history, evaluations,
the newest checkpoint, warnings. docs/metrics.md says what the numbers are.

Reads the files of RUN_FOLDER and nothing else, so it works on a folder that another machine writes, also of a run that has ended. Prints
once where the output is no terminal."""

#: Columns where the output is no terminal.
_WIDTH = 100
#: Characters of a history, from low to high, and how many of its values are shown.
_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 30
#: Seconds without a word after which it is said: phases may take long, and are told when they are over.
_QUIET_S = 60.0
_STYLES = {"completed": "green", "running": "green", "starting": "yellow", "interrupted": "yellow"}
_SAID = {"gone": "ended without a word: killed?"}
#: Phases whose names in events are not the words for them.
_PHASES = {"update_weights": "weights to the engine", "eval": "evaluation", "save": "checkpoint"}

Row = tuple[str, str]


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    arguments = _parse(argv)
    folder: Path = arguments.run
    if not os.path.isfile(folder / "config.toml"):
        raise ConfigError([no_run("slime top", folder, lacks="config.toml")])
    run = WatchedRun(folder)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    run.refresh()
    if console.is_terminal and not arguments.once:
        try:
            _watch(run, console, interval_s=arguments.interval)
        except Interrupted:
            return 0
    console.print(view(run, width=console.width))
    return 0


def _watch(run: WatchedRun, console: Console, *, interval_s: float) -> None:
    """Show a run until it has ended."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while run.is_going_on:
            live.update(view(run, width=console.width), refresh=True)
            time.sleep(interval_s)
            run.refresh()


def view(run: WatchedRun, *, width: int) -> Table:
    """Return a run as rows of a name and what is to be said, for a terminal of so many columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    status = run.status
    head = Text.assemble(
        (str(run.dir.path), "bold"), "  ", (_SAID.get(status, status), _STYLES.get(status, "red"))
    )
    table.add_row("run", head)
    rows = [*_progress(run, width=width), *_now(run)]
    if run.steps:
        rows += [*_speed(run), *_learning(run.steps, run.steps[-1], width=width)]
    for name, value in [*rows, *_evaluations(run.rows), *_files(run)]:
        table.add_row(name, Text(_printable(value)))
    return table


def _progress(run: WatchedRun, *, width: int) -> Iterator[Row]:
    done, of = run.done_steps, run.plan.num_steps
    if of is None:
        yield "step", f"{done} done; how many there are depends on the data (--num-epoch)"
    else:
        n_bars = max(10, min(50, width - 45))
        n_full = round(n_bars * min(1.0, done / of))
        yield "step", f"{done} of {of}  {'━' * n_full}{'─' * (n_bars - n_full)}  {done / of:.0%}"
    if (eta := run.eta_s) is not None:
        at = time.strftime("%a %H:%M", time.localtime(run.now + eta))
        yield "left", f"{_duration(eta)}, until {at}"
    if "error" in run.summary and not run.is_going_on:
        yield "error", str(run.summary["error"])
    if "wall_s" in run.summary and not run.is_going_on:
        yield "took", _duration(float(run.summary["wall_s"]))


def _now(run: WatchedRun) -> Iterator[Row]:
    """Say what goes on now; nothing of a run that has ended."""
    if not run.is_going_on:
        return
    if run.status == "starting":
        yield "now", "starts: model, trainer, engine and rewards; there are no events before they are up"
    elif not run.has_events:
        yield "now", "unknown: the run writes no events (--no-events)"
    else:
        clock, activity = run.run_clock, run.activity
        phases = [phase for phase in (activity.phase, activity.rollout) if phase is not None]
        yield "now", "; ".join(_phase(phase, clock) for phase in phases) or "between two steps"
        at_least = "at least " if run.passes_over_events else ""
        yield (
            "queues",
            f"{at_least}{len(activity.in_flight)} groups ({activity.requests_in_flight} requests) in flight, "
            f"{len(activity.finished)} finished ones wait",
        )
        requests, tokens = activity.rates(clock)
        yield "engine", f"{tokens:,.0f} tokens/s, {requests:.1f} requests/s answered in the last 30 s"
    if (quiet := run.quiet_s) is not None and quiet > _QUIET_S:
        yield "quiet", f"nothing was written for {_duration(quiet)}"


def _phase(phase: CurrentPhase, clock: float) -> str:
    name = _PHASES.get(phase.name, phase.name)
    of = (
        f" of step {phase.step}"
        if phase.name in ("rollout", "train", "batch")
        else f" after step {phase.step}"
    )
    return f"{name}{of} for {_duration(clock - phase.since)}"


def _speed(run: WatchedRun) -> Iterator[Row]:
    row = run.steps[-1]
    seconds = max(row["perf/step_time"], 1e-6)
    told = [f"{_duration(seconds)} a step"]
    if "rollout/samples" in row and "rollout/response_len/mean" in row:
        tokens = row["rollout/samples"] * row["rollout/response_len/mean"]
        told.append(f"{tokens / seconds:,.0f} tokens/s generated")
    if "perf/train_tokens" in row:
        told.append(f"{row['perf/train_tokens'] / seconds:,.0f} tokens/s trained on")
    if "rollout/samples" in row:
        told.append(f"{row['rollout/samples'] / seconds:.1f} samples/s")
    yield f"step {row['step']:g}", ", ".join(told)
    names = (("rollout_time", "rollout"), ("train_time", "train"), ("update_weights_time", "weights"))
    parts = [f"{label} {_duration(row[f'perf/{name}'])}" for name, label in names if f"perf/{name}" in row]
    if parts:
        yield "of it", ", ".join(parts)
    idle = [
        f"{who} {row[f'perf/{who}_idle_share']:.0%}"
        for who in ("engine", "trainer")
        if f"perf/{who}_idle_share" in row
    ]
    if idle:
        yield "idle", ", ".join(idle)
    yield "staleness", _staleness(row)
    if "rollout/concurrency" in row:
        limit, most = row["rollout/concurrency"], row.get("rollout/requests_in_flight", math.nan)
        told = [f"limit {limit:g}", f"at most {most:g} in flight"]
        for name, label in (
            ("rollout/requests_waiting", "waited for it"),
            ("engine/retractions", "retracted"),
        ):
            told += [f"{row[name]:g} {label}"] if name in row else []
        yield "requests", ", ".join(told)


def _staleness(row: Mapping[str, float]) -> str:
    if "rollout/staleness/max" not in row:
        return "0: all tokens are of the weights that were trained"
    return f"mean {row['rollout/staleness/mean']:.2f}, at most {row['rollout/staleness/max']:g} steps"


def _learning(steps: Sequence[Mapping[str, float]], row: Mapping[str, float], *, width: int) -> Iterator[Row]:
    room = max(8, min(_HISTORY, width - 45))
    for name, label in (("rollout/raw_reward", "reward"), ("train/loss", "loss")):
        if name in row and (name != "train/loss" or "rollout/raw_reward" not in row):
            values = [one[name] for one in steps if name in one]
            since = f"since step {steps[0]['step']:g}, which had {values[0]:.3f}"
            yield label, f"{values[-1]:.3f}  {bars(_thinned(values, room))}  {since}"
    if "rollout/response_len/mean" in row:
        cut = row.get("rollout/truncated_ratio", 0.0)
        yield "responses", f"{row['rollout/response_len/mean']:.1f} tokens, {cut:.0%} cut off"
    told = []
    for name, label, form in (
        ("train/grad_norm", "gradient norm", ".3g"),
        ("train/lr", "learning rate", ".2g"),
        ("train/train_rollout_logprob_abs_diff", "log-prob diff", ".1e"),
    ):
        told += [f"{label} {row[name]:{form}}"] if name in row else []
    if row.get("train/skipped_steps"):
        told.append(f"{row['train/skipped_steps']:g} optimizer steps skipped")
    if told:
        yield "training", ", ".join(told)


def _evaluations(rows: Iterable[Mapping[str, float]]) -> Iterator[Row]:
    """Yield the history of each evaluation set."""
    rows = list(rows)
    names = {name for row in rows for name in row if name.startswith("eval/") and "/" not in name[5:]}
    shown = sorted(name for name in names if not name.endswith("-truncated_ratio"))
    for number, name in enumerate(shown):
        found = [(row["step"], row[name]) for row in rows if name in row]
        values = " → ".join(f"{value:.3f}" for _, value in found[-4:])
        yield ("" if number else "evaluation"), f"{name[5:]} {values} (after step {found[-1][0]:g})"


def _files(run: WatchedRun) -> Iterator[Row]:
    if run.checkpoint is not None:
        step, at = run.checkpoint
        yield "checkpoint", f"step {step}, {_duration(max(0.0, run.now - at))} ago"
    else:
        yield "checkpoint", "none yet" if run.is_going_on else "none"
    for number, warning in enumerate(run.warnings):
        yield ("" if number else "warnings"), warning
    if run.n_warnings > len(run.warnings):
        yield "", f"{run.n_warnings} in all: log.txt"
    if run.activity.n_unreadable:
        yield "events", f"{run.activity.n_unreadable} lines are no events"


def bars(values: Sequence[float]) -> str:
    """Return numbers as bars, the lowest and the highest of them as the lowest and the highest bar; `?` for what is no number."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if math.isfinite(value) else "?" for value in values)


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """Return means of equally many values in a row, no more than `most`: a whole history in that room."""
    size = math.ceil(len(values) / most)
    parts = [values[begin : begin + size] for begin in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def _duration(seconds: float) -> str:
    """Return seconds as text: `35 ms`, `4.2 s`, `3 min 10 s`, `5 h 2 min`, `3 d 4 h`."""
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, small, size, of in (("min", "s", 60, 1), ("h", "min", 3600, 60), ("d", "h", 86400, 3600)):
        if unit == "d" or whole < size * (60 if unit == "min" else 24):
            return f"{whole // size} {unit} {whole % size // of} {small}"
    raise AssertionError("days have no end")


def _printable(text: str) -> str:
    """Return text whose control characters, which would move the cursor or change colours, are question marks."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slime top",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="the folder of a run")
    parser.add_argument("--once", action="store_true", help="print once, and leave")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks"
    )
    return parser.parse_args(argv)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"found {text}; wanted seconds from 0.1 to 3600")
    return value
