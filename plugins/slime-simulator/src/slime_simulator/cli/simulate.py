"""`slime simulate`: how fast a run would be by each loop, how old its samples would get, and what would limit it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from slime_core.cli.arguments import wide_console
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry

from slime_simulator.cli.options import Asked, parser, read
from slime_simulator.cli.replay import replay_command
from slime_simulator.limits import Limit, limits
from slime_simulator.presets import PRESETS, scenarios
from slime_simulator.scenario import variants
from slime_simulator.simulation import Simulated

#: Names of the loops that are compared.
LOOPS = ("sync, shared GPUs", "sync", "one-step-off", "fully-async")


def main(argv: list[str]) -> int:
    """Simulate a run by the loops beside each other, in virtual time.

    The loops, the dispatcher and all that a run does are those of `slime train`; engine and trainer are models of what they cost.
    Costs are estimated from the data sheet of a GPU, or with --from-run fitted from runs.
    """
    options = parser("slime simulate", main.__doc__ or "")
    options.add_argument("--trainer-gpus", type=int, help="GPUs that train (half of --gpus)")
    options.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS), help="those to compare")
    options.add_argument("--no-limits", action="store_true", help="do not look for what limits")
    names = ", ".join(PRESETS)
    options.add_argument(
        "--preset", choices=PRESETS, help=f"a published comparison instead: {names}; takes --steps"
    )
    options.add_argument(
        "--replay",
        type=Path,
        metavar="RUN",
        help="make the decisions of a recorded run again instead, and compare them: exit status 1 where one differs; takes --json",
    )
    given = {word.split("=")[0] for word in argv}
    if "--preset" in given:
        return _published(_alone(options, argv, "--preset", "--steps", "--json"))
    if "--replay" in given:
        known = _alone(options, argv, "--replay", "--json")
        return replay_command(known.replay, as_json=known.json)
    asked = read(options, argv)
    found = simulated(asked, asked.options.loops, with_limits=not asked.options.no_limits)
    if asked.options.json:
        rows = {
            name: as_json(each) | {"limits": [asdict(limit) for limit in limited]}
            for name, (each, limited) in found.items()
        }
        print(json.dumps({"gpus": asked.gpus, "costs": asdict(asked.scenario.costs), "loops": rows}))
    else:
        _show(asked, found)
    return 0


def _alone(
    options: argparse.ArgumentParser, argv: Sequence[str], flag: str, *with_it: str
) -> argparse.Namespace:
    """Read a command line of one flag that takes few others.

    Raises:
        ConfigError: there are others, or a recipe.
    """
    known, words = options.parse_known_args(argv)
    flags = {word.split("=")[0] for word in argv if word.startswith("--")}
    other = sorted(flags - {flag, *with_it}) + [word for word in words if not word.startswith("--")]
    if other:
        wanted = f"{flag} alone, or with {', '.join(with_it)}: all else is that run's"
        raise ConfigError([Problem(flag, f"also {' '.join(other)}", wanted)])
    return known


def simulated(
    asked: Asked, names: Sequence[str], *, with_limits: bool
) -> dict[str, tuple[Simulated, list[Limit]]]:
    """Return what each loop would do, and what limits it."""
    chosen = variants(asked.scenario, gpus=asked.gpus)
    for name in names:
        chosen[name].check()
    return {
        name: (
            chosen[name].simulate(asked.registry),
            limits(chosen[name], asked.registry) if with_limits else [],
        )
        for name in names
    }


def as_json(found: Simulated) -> dict[str, object]:
    """Return a simulation's figures as JSON values."""
    rates = {
        "steps_per_s": found.steps / found.wall_s,
        "samples_per_s": found.samples_per_s,
        "tokens_per_s": found.tokens_per_s,
    }
    return asdict(found) | rates


def _published(options: argparse.Namespace) -> int:
    """Simulate both sides of a published comparison."""
    registry, preset = Registry.from_environment(), PRESETS[options.preset]()
    work = scenarios(preset, registry, steps=max(1, options.steps))
    found = {name: each.simulate(registry) for name, each in work.items()}
    before, after = found.values()
    ratio = before.wall_s / after.wall_s
    if options.json:
        rows = {name: as_json(each) for name, each in found.items()}
        print(
            json.dumps(
                {"preset": options.preset, "ratio": ratio, "published": preset.published, "sides": rows}
            )
        )
        return 0
    console = wide_console()
    console.print(preset.title)
    console.print(_table({name: (each, []) for name, each in found.items()}))
    console.print(
        f"simulated: {ratio:.2f} over {options.steps} steps; published: {preset.published}\n{preset.explains}"
    )
    return 0


def _show(asked: Asked, found: dict[str, tuple[Simulated, list[Limit]]]) -> None:
    console, work = wide_console(), asked.scenario
    rollout, cluster = work.settings.rollout, work.cluster
    console.print(asked.costs_of)
    console.print(
        f"{asked.gpus} GPUs: {cluster.replicas} replicas of {cluster.gpus_per_replica} and {cluster.trainer_gpus} that train "
        f"(shared: all do both); {rollout.rollout_batch_size} x {rollout.n_samples_per_prompt} samples a step, "
        f"{asked.options.steps} steps; a decode step of one request {1000 * work.costs.engine.step_s:.3g} ms"
    )
    console.print(_table(found))
    for name, (_, limited) in found.items():
        if limited:
            console.print(f"{name}: limited by {', then '.join(map(str, limited[:2]))}")


def _table(found: dict[str, tuple[Simulated, list[Limit]]]) -> Table:
    """Return a row for each simulation."""
    columns = (
        "loop",
        "steps/h",
        "samples/s",
        "tokens/s",
        "x first",
        "staleness mean, max",
        "engine idle",
        "trainer idle",
        "updates",
    )
    table = Table(*columns, box=None, pad_edge=False)
    first = next(iter(found.values()))[0].wall_s
    for name, (each, _) in found.items():
        table.add_row(
            name,
            f"{3600 * each.steps / each.wall_s:.1f}",
            f"{each.samples_per_s:.2f}",
            f"{each.tokens_per_s:,.0f}",
            f"{first / each.wall_s:.2f}",
            f"{each.staleness_mean:.2f}, {each.staleness_max}",
            *(f"{100 * share:.0f}%" for share in (each.engine_idle, each.trainer_idle, each.update_share)),
        )
    return table
