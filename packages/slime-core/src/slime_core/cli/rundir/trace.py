"""`slime trace`: the events of a run as a file that Perfetto opens."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from slime_core.cli.arguments import no_run
from slime_core.errors import ConfigError, Problem
from slime_core.rundir.events import read_events
from slime_core.rundir.perfetto import trace_events
from slime_core.rundir.records import atomic_file
from slime_core.rundir.rundir import RunDir

DESCRIPTION = """Write the timeline of a run as a file for Perfetto: open https://ui.perfetto.dev and drop the file there; it stays on your
machine. Tracks: `run` with the loop's phases, the rollouts and the dispatcher's decisions; `trainer` with each rank; each replica of
the engine with its requests in flight; and `rewards`. A click on a span shows its sample, tokens and so on; docs/events.md explains them.

Reads RUN_FOLDER/events.jsonl, also while the run goes on or after a crash. Processes that resumed the run follow each other."""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    arguments = _parse(argv)
    run: Path = arguments.run
    out: Path = run / "trace.json" if arguments.out is None else arguments.out
    folder = RunDir(run)
    if not os.path.exists(folder.events) and not os.path.exists(folder.config):
        raise ConfigError([no_run("slime trace", run, lacks="events.jsonl")])
    n_events = write_trace(folder.events, out)
    print(f"{out}: {n_events} events; open it in https://ui.perfetto.dev")
    return 0


def write_trace(events: Path, out: Path) -> int:
    """Write the trace of an `events.jsonl` whole or not at all; returns how many events it has.

    Raises:
        ConfigError: the events cannot be read, or the trace not be written.
    """
    if out.is_dir() or not out.name or out.resolve() == events.resolve():
        raise ConfigError([Problem("--out", str(out), "a file of its own: it is replaced")])
    told = list(read_events(events))
    try:
        with atomic_file(out) as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(trace_events(told)):
                file.write((b",\n" if number else b"") + json.dumps(event).encode())
            file.write(b"\n]}\n")
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError([Problem("--out", f"{out} ({why})", "a file that can be written")]) from error
    return len(told)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slime trace",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN_FOLDER", type=Path, help="folder of a run, or of an evaluation")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (RUN_FOLDER/trace.json)")
    return parser.parse_args(argv)
