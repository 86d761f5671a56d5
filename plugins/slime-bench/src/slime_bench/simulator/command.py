"""`slime bench simulator`: runs on the real clock beside their simulation, with costs that were fitted from some of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_core.cli.arguments import wide_console
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_simulator.costs.fit import fit
from slime_simulator.costs.recorded import read_run

from slime_bench.simulator.comparison import Compared, compare, is_off, summary_of, table_of, typical_of
from slime_bench.simulator.computing import FITTED, PREDICTED, mixed, noise_of, run_all
from slime_bench.simulator.waiting import CONFIGURATIONS, REAL, TRACE, run_really, settings_of

#: Steps of a run, the first left out, where engine and trainer compute; and where they wait.
_STEPS_OF_REAL, _STEPS = 9, 8
#: How often each configuration runs, where engine and trainer compute.
_REPEATS = 3


def simulator(argv: list[str]) -> int:
    """Set runs on the real clock beside their simulation, with costs fitted from some of them alone.

    Engine and trainer wait on the real clock, the engine one decode step after the other, and compute nothing; loops, dispatcher,
    batches, records and folders are those of every run. With --real they are the engine `torch` and the trainer `megatron` over a
    small random llama, with a thread each: 3 runs say what the parts cost, 12 others between them are predicted, from their
    settings and the lengths of their samples; all that several times, of which the medians are compared. The exit status is 1 if
    a step time is off by more than 10%, or the median by more than 5%.
    """
    parser = argparse.ArgumentParser(prog="slime bench simulator", description=simulator.__doc__)
    parser.add_argument("--real", action="store_true", help="with an engine and a trainer that compute")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"steps of each run ({_STEPS}; with --real {_STEPS_OF_REAL}, the first left out)",
    )
    parser.add_argument(
        "--only", type=int, help="the first so many configurations; with --real of those predicted"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        help=f"with --real: how often each configuration runs, all of them in turns ({_REPEATS})",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="with --real: leave the runs there")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
    _check(arguments)
    with contextlib.ExitStack() as stack:
        root = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slime-bench-")))
        measure = _real if arguments.real else _waiting
        found, told = measure(root, arguments)
    if arguments.json:
        rows = [asdict(each) | {"error": each.error} for each in found]
        print(json.dumps(told | {"configurations": rows}))
    else:
        _show(found, told)
    return int(is_off(found))


def _check(arguments: argparse.Namespace) -> None:
    problems = []
    least = 4 if arguments.real else 1
    if arguments.steps is not None and arguments.steps < least:
        problems.append(Problem("--steps", str(arguments.steps), f"at least {least}"))
    if arguments.only is not None and arguments.only < 1:
        problems.append(Problem("--only", str(arguments.only), "at least 1"))
    if arguments.repeats is not None and arguments.repeats < 1:
        problems.append(Problem("--repeats", str(arguments.repeats), "at least 1"))
    if arguments.repeats is not None and not arguments.real:
        problems.append(Problem("--repeats", str(arguments.repeats), "--real with it"))
    if arguments.keep is not None and not arguments.real:
        problems.append(Problem("--keep", str(arguments.keep), "--real with it"))
    if arguments.keep is not None and arguments.keep.exists() and any(arguments.keep.iterdir()):
        problems.append(Problem("--keep", f"{arguments.keep}, which holds something", "a new folder"))
    if problems:
        raise ConfigError(problems)


def _waiting(root: Path, arguments: argparse.Namespace) -> tuple[list[Compared], dict[str, Any]]:
    registry = Registry.from_environment()
    names = list(CONFIGURATIONS)[: max(2, arguments.only or len(CONFIGURATIONS))]
    folders = {name: root / f"{number:02d}" for number, name in enumerate(names)}
    with contextlib.redirect_stdout(None):
        for name, folder in folders.items():
            folder.mkdir()
            run_really(settings_of(name, registry, steps=arguments.steps or _STEPS), folder)
    costs = fit([read_run(folders[names[0]])], slots=REAL.engine.slots)
    found = [
        compare(name, folder, costs=costs, trace=TRACE, registry=registry, is_fitted=name == names[0])
        for name, folder in folders.items()
    ]
    return found, {"real": asdict(REAL), "fitted": asdict(costs)}


def _real(root: Path, arguments: argparse.Namespace) -> tuple[list[Compared], dict[str, Any]]:
    predicted = PREDICTED[: arguments.only]
    order, steps = mixed(FITTED, predicted), arguments.steps or _STEPS_OF_REAL
    rounds = [run_all(root / f"round-{i}", order, steps=steps) for i in range(arguments.repeats or _REPEATS)]
    registry = Registry.from_environment()
    runs = [{each: read_run(folder) for each, folder in folders.items()} for folders in rounds]
    sources = [of_round[each] for of_round in runs for each in FITTED]
    slots = sources[0].slots
    assert slots is not None
    costs = fit(sources, slots=slots)
    found = [
        typical_of(
            [
                compare(
                    each.name,
                    folders[each],
                    costs=costs,
                    trace=of_round[each].trace,
                    registry=registry,
                    is_fitted=each in FITTED,
                    warm_up=1,
                )
                for folders, of_round in zip(rounds, runs, strict=True)
            ]
        )
        for each in order
    ]
    return found, {"fitted": asdict(costs), "noise": noise_of(sources, costs), "load": os.getloadavg()[1]}


def _show(found: Sequence[Compared], told: dict[str, Any]) -> None:
    console = wide_console()
    for part, fitted in told["fitted"].items():
        if isinstance(fitted, dict):
            console.print(f"{part}, fitted{_asked(told, part)}: {_coefficients(fitted, told, part)}")
    console.print(table_of(found))
    console.print(summary_of(found))
    if "noise" in told:
        console.print(_limits(told))


def _asked(told: dict[str, Any], part: str) -> str:
    return " (asked of the waits)" if part in told.get("real", {}) else ""


def _coefficients(fitted: dict[str, float], told: dict[str, Any], part: str) -> str:
    asked = told.get("real", {}).get(part)
    return ", ".join(
        f"{key} {value:.3g}" + (f" ({asked[key]:.3g})" if asked else "") for key, value in fitted.items()
    )


def _limits(told: dict[str, Any]) -> str:
    """Say what the predictions cannot be better than."""
    noise = "".join(
        f"; the {part}'s time of a step varied by {100 * share:.0f}%" for part, share in told["noise"].items()
    )
    slowdown = told["fitted"]["slowdown"]
    return (
        f"what limits it: load {told['load']:.1f} over 5 minutes, where 2 is this bench alone{noise} around its fitted cost. "
        f"Where engine and trainer are at work together, factors from one configuration stand for all that they share (cores, memory, the "
        f"interpreter): {slowdown['step']:.2f} of a decode step, {slowdown['request']:.2f} of its requests, {slowdown['trainer']:.2f} of training."
    )
