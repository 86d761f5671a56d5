"""What the two commands share: their flags, and the scenario that these and a recipe describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from slime_core.cli.arguments import split
from slime_core.config.load import load_settings
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.rundir.rundir import RunDir

from slime_simulator.costs.costs import Costs
from slime_simulator.costs.fit import fit, scaled
from slime_simulator.costs.hardware import GPUS, MODELS, estimate
from slime_simulator.costs.recorded import read_run
from slime_simulator.costs.traces import Lognormal, Trace
from slime_simulator.scenario import Scenario
from slime_simulator.simulation import Cluster

#: Lengths are below it.
_MOST_TOKENS = 1 << 31
#: More are not to be had, and would be simulated one by one.
_MOST_GPUS = 100_000
#: Requests that a replica decodes together, where nothing says it.
_SLOTS = 256
#: Flags of costs and lengths that are estimated, and those of costs that are fitted.
_ESTIMATED = frozenset({"--gpu", "--model", "--median-tokens", "--p99-tokens", "--prompt-tokens"})
_SCALED = frozenset({"--engine-scale", "--trainer-scale"})
#: Settings of a simulation without a recipe.
_WITHOUT_RECIPE = {
    "hf-checkpoint": "simulated",
    "rollout-batch-size": "128",
    "n-samples-per-prompt": "8",
    "rollout-max-response-len": "16384",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for."""

    scenario: Scenario
    costs_of: str
    """What the costs and the lengths are those of, for people."""
    gpus: int
    registry: Registry
    options: argparse.Namespace


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that both commands have."""
    made = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [RECIPE ...] [--flag value ...]",
        description=description,
        epilog="All other flags are settings of the run: slime config flags. Loop, batch sizes, staleness, order, partial "
        "rollouts and weight updates count; generators, rewards and filters do not: each prompt gets one turn, and no group "
        "is dropped.",
        allow_abbrev=False,
    )  # fmt: skip
    add = made.add_argument
    add("--gpus", type=int, default=64, help="GPUs of engine and trainer together (%(default)s)")
    add("--gpus-per-replica", type=int, default=1, help="GPUs of a replica of the engine (%(default)s)")
    add(
        "--slots",
        type=int,
        help="requests that a replica decodes together (256; with --from-run as there, if it says, whose costs are fitted by its own)",
    )
    add("--steps", type=int, default=20, help="steps to simulate (%(default)s)")
    add(
        "--from-run",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run folders: the lengths of the first, its settings where there is no recipe, and costs fitted from all: of the loop sync, and of one-step-off for how much "
        "engine and trainer slow each other down",
    )
    add("--engine-scale", type=float, default=1.0, help="with --from-run: times as fast as there")
    add("--trainer-scale", type=float, default=1.0, help="with --from-run: times as fast as there")
    add(
        "--gpu",
        choices=GPUS,
        default="h100",
        help="without --from-run: GPU that costs are estimated of (%(default)s)",
    )
    add(
        "--model",
        choices=MODELS,
        default="qwen2.5-7b",
        help="without --from-run: model of that size (%(default)s)",
    )
    add("--median-tokens", type=float, default=2000, help="without --from-run: median response (%(default)s)")
    add(
        "--p99-tokens",
        type=float,
        default=16000,
        help="without --from-run: 99th percentile, lognormal (%(default)s)",
    )
    add("--prompt-tokens", type=int, default=300, help="without --from-run: prompts (%(default)s)")
    add("--json", action="store_true", help="print JSON")
    return made


def read(options: argparse.ArgumentParser, argv: Sequence[str]) -> Asked:
    """Read a command line.

    Raises:
        ConfigError: carries what is wrong with it.
    """
    registry = Registry.from_environment()
    recipes, flags = split(argv)
    known, words = options.parse_known_args(flags)
    _check(known, given={word.partition("=")[0] for word in flags})
    if not recipes and known.from_run and RunDir(known.from_run[0]).config.is_file():
        recipes = [str(RunDir(known.from_run[0]).config)]
    if not recipes:
        missing = {name: value for name, value in _WITHOUT_RECIPE.items() if f"--{name}" not in words}
        words = [word for name, value in missing.items() for word in (f"--{name}", value)] + words
    settings = load_settings(recipes, words, registry=registry)
    settings = settings.having("run", "num_rollout", known.steps, origin="--steps")
    costs, trace = _costs(known, settings)
    trainer_gpus = getattr(known, "trainer_gpus", None)
    if trainer_gpus is None:
        trainer_gpus = known.gpus // 2
    cluster = Cluster(
        replicas=(known.gpus - trainer_gpus) // known.gpus_per_replica,
        trainer_gpus=trainer_gpus,
        gpus_per_replica=known.gpus_per_replica,
    )
    scenario = Scenario(settings=settings, costs=costs, cluster=cluster, trace=trace)
    model = settings.model.hf_checkpoint if recipes and not _gives_model(flags) else None
    return Asked(
        scenario=scenario, costs_of=_costs_of(known, model), gpus=known.gpus, registry=registry, options=known
    )


def _gives_model(flags: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--model" for word in flags)


def _costs_of(known: argparse.Namespace, other_model: str | None) -> str:
    """Return what the costs are those of; `other_model` is a recipe's, whose costs they are not."""
    if known.from_run is not None:
        return f"costs and lengths of {', '.join(map(str, known.from_run))}"
    named = f" (not of the recipe's {other_model}: give --model)" if other_model else ""
    return (
        f"costs of {known.model} on {known.gpu} by data sheet{named}; responses of {known.median_tokens:,.0f} tokens in the median, "
        f"{known.p99_tokens:,.0f} at the 99th percentile; --from-run fits those of your runs"
    )


def _check(known: argparse.Namespace, *, given: Set[str]) -> None:
    wanted = {
        "gpus": 2,
        "gpus_per_replica": 1,
        "slots": 1,
        "steps": 1,
        "median_tokens": 1,
        "prompt_tokens": 0,
    }
    problems = [
        Problem(f"--{name.replace('_', '-')}", str(getattr(known, name)), f"at least {least}")
        for name, least in wanted.items()
        if getattr(known, name) is not None and not getattr(known, name) >= least
    ]
    if not known.median_tokens <= known.p99_tokens < _MOST_TOKENS:
        within = f"at least the median, {known.median_tokens:g}, and below {_MOST_TOKENS:,}"
        problems.append(Problem("--p99-tokens", f"{known.p99_tokens:g}", within))
    for name in ("gpus", "gpus_per_replica"):
        if getattr(known, name) > _MOST_GPUS:
            where = f"--{name.replace('_', '-')}"
            problems.append(Problem(where, str(getattr(known, name)), f"at most {_MOST_GPUS:,}"))
    if known.prompt_tokens >= _MOST_TOKENS:
        problems.append(Problem("--prompt-tokens", str(known.prompt_tokens), f"below {_MOST_TOKENS:,}"))
    for name in ("engine_scale", "trainer_scale"):
        if not getattr(known, name) > 0:
            problems.append(Problem(f"--{name.replace('_', '-')}", str(getattr(known, name)), "above 0"))
    has_run = known.from_run is not None
    for flag in sorted(given & (_ESTIMATED if has_run else _SCALED)):
        why = "which says it" if has_run else "of whose costs it is"
        problems.append(
            Problem(flag, f"it {'with' if has_run else 'without'} --from-run", f"one of them, {why}")
        )
    if problems:
        raise ConfigError(problems)


def _costs(known: argparse.Namespace, settings: Settings) -> tuple[Costs, Trace]:
    if known.from_run is not None:
        runs = [read_run(folder) for folder in known.from_run]
        problems = [
            Problem(
                "--from-run",
                f"{run.folder}, of {run.replicas} engines",
                "a run of one: which had how much to do is not told",
            )
            for run in runs
            if run.replicas > 1
        ]
        if problems:
            raise ConfigError(problems)
        recorded = runs[0].slots or known.slots or _SLOTS
        known.slots = known.slots or recorded
        found = scaled(fit(runs, slots=recorded), engine=known.engine_scale, trainer=known.trainer_scale)
        return replace(found, engine=replace(found.engine, slots=known.slots)), runs[0].trace
    known.slots = known.slots or _SLOTS
    longest = settings.rollout.rollout_max_response_len
    size, gpu = MODELS[known.model], GPUS[known.gpu]
    costs = estimate(size, gpu, gpus_per_replica=known.gpus_per_replica, slots=known.slots)
    trace = Lognormal(
        median=known.median_tokens, p99=known.p99_tokens, longest=longest, prompt=known.prompt_tokens,
        seed=settings.rollout.rollout_seed,
    )  # fmt: skip
    return costs, trace
