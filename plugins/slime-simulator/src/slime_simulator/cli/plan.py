"""`slime plan`: the split of GPUs, the loop, the bound on staleness and the requests in flight that a recipe would run best with."""

from __future__ import annotations

import json

from rich.table import Table
from slime_core.cli import memory
from slime_core.cli.arguments import wide_console
from slime_core.errors import ConfigError, Problem

from slime_simulator.cli.options import Asked, parser, read
from slime_simulator.cli.simulate import as_json
from slime_simulator.limits import limits
from slime_simulator.planning import Plan, candidates, plans, splits


def main(argv: list[str]) -> int:
    """Simulate a recipe with many splits of its GPUs, loops, bounds on staleness and requests in flight; print the best.

    Of plans that are within 2% of each other the one whose samples are younger comes first. What is faster is not what learns
    better: staleness is a price, and what it costs in learning no simulation says. With --memory nothing is simulated: what each
    rank takes of memory is printed, and what would take less where it does not fit.
    """
    if "--memory" in argv:
        return memory.main([word for word in argv if word != "--memory"])
    options = parser("slime plan", main.__doc__ or "")
    options.add_argument(
        "--memory",
        action="store_true",
        help="what the recipe takes of memory instead; slime plan --memory --help",
    )
    options.set_defaults(steps=8)
    options.add_argument(
        "--staleness", type=int, nargs="+", default=[1, 2, 4], help="bounds to try (%(default)s)"
    )
    options.add_argument(
        "--concurrency", type=int, nargs="+", help="slots of a replica to try (--slots alone)"
    )
    options.add_argument("--best", type=int, default=5, help="plans to print (%(default)s)")
    asked = read(options, argv)
    known = asked.options
    slots = known.concurrency or [known.slots]
    problems = []
    if not splits(asked.gpus, known.gpus_per_replica):
        wanted = f"at least {known.gpus_per_replica + 1}: a replica, and one that trains"
        problems.append(Problem("--gpus", str(asked.gpus), wanted))
    if min(known.staleness) < 0 or min(slots) < 1:
        problems.append(
            Problem("--staleness, --concurrency", f"{known.staleness}, {slots}", "0 or more, 1 or more")
        )
    if problems:
        raise ConfigError(problems)
    ways = list(candidates(asked.scenario, gpus=asked.gpus, bounds=known.staleness, slots=slots))
    ranked = plans(ways, asked.registry)[: max(1, known.best)]
    if known.json:
        rows = [as_json(plan.found) | {"flags": plan.flags, "slots": plan.slots} for plan in ranked]
        print(json.dumps({"gpus": asked.gpus, "tried": len(ways), "plans": rows}))
    else:
        _show(asked, ranked, tried=len(ways))
    return 0


def _show(asked: Asked, ranked: list[Plan], *, tried: int) -> None:
    console = wide_console()
    columns = (
        "",
        "engine + trainer GPUs",
        "loop",
        "slots",
        "steps/h",
        "staleness mean, max",
        "engine idle",
        "trainer idle",
    )
    table = Table(*columns, box=None, pad_edge=False)
    for number, plan in enumerate(ranked, 1):
        cluster, found = plan.scenario.cluster, plan.found
        split = f"{cluster.replicas * cluster.gpus_per_replica} + {cluster.trainer_gpus}"
        shared = plan.scenario.settings.cluster.colocate
        table.add_row(
            str(number),
            f"{cluster.trainer_gpus} shared" if shared else split,
            found.loop,
            str(plan.slots),
            f"{3600 * found.steps / found.wall_s:.1f}",
            f"{found.staleness_mean:.2f}, {found.staleness_max}",
            f"{100 * found.engine_idle:.0f}%",
            f"{100 * found.trainer_idle:.0f}%",
        )
    console.print(asked.costs_of)
    console.print(f"{tried} ways to use {asked.gpus} GPUs were simulated, {asked.options.steps} steps each")
    console.print(table)
    limited = limits(ranked[0].scenario, asked.registry)
    if limited:
        console.print(f"1 is limited by {', then '.join(map(str, limited[:2]))}")
    for number, plan in enumerate(ranked, 1):
        console.print(f"{number}: {plan.flags}", soft_wrap=True)
