"""A run beside its simulation: the step time that was measured, and the one that was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from rich.table import Table
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.rundir.records import read_records
from slime_core.rundir.rundir import RunDir
from slime_simulator.costs.costs import Costs
from slime_simulator.costs.recorded import read_run
from slime_simulator.costs.traces import Trace
from slime_simulator.scenario import Scenario
from slime_simulator.simulation import Cluster

#: What the runs of the bench have.
_ONE = Cluster(replicas=1, trainer_gpus=1)
#: Errors above which the exit status is 1: of each configuration, and in the median.
MOST, MEDIAN = 0.10, 0.05


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A configuration, as it was and as it was predicted."""

    name: str
    real_s: float
    """Seconds of a step: the mean."""
    simulated_s: float
    real_staleness: float
    simulated_staleness: float
    is_fitted: bool
    """Whether the costs come from it, among others: then it is no prediction."""

    @property
    def error(self) -> float:
        """Share by which the prediction is off."""
        return self.simulated_s / self.real_s - 1


def compare(
    name: str,
    folder: Path,
    *,
    costs: Costs,
    trace: Trace,
    registry: Registry,
    is_fitted: bool,
    warm_up: int = 0,
) -> Compared:
    """Set a real run beside its simulation.

    Args:
        name: of the configuration.
        folder: of the run. Its settings are simulated; its times are what the simulation is compared with, and nothing else.
        costs: of the parts.
        trace: lengths of the run's samples.
        registry: has the loops.
        is_fitted: whether the costs come from it.
        warm_up: steps at the begin that are left out, on both sides.
    """
    settings = load_settings([str(folder / "config.toml")], [], registry=registry)
    rows = [step.metrics for step in read_run(folder).steps]
    found = Scenario(settings=settings, costs=costs, cluster=_ONE, trace=trace).simulate(registry)
    return Compared(
        name=name,
        real_s=mean(row["perf/step_time"] for row in rows[warm_up:]),
        simulated_s=mean(found.step_times[warm_up:]),
        real_staleness=mean(_ages(RunDir(folder), steps=len(rows))),
        simulated_staleness=found.staleness_mean,
        is_fitted=is_fitted,
    )


def typical_of(found: Sequence[Compared]) -> Compared:
    """Return the medians of a configuration that was run several times."""
    return replace(
        found[0],
        real_s=median(each.real_s for each in found),
        simulated_s=median(each.simulated_s for each in found),
        real_staleness=median(each.real_staleness for each in found),
        simulated_staleness=median(each.simulated_staleness for each in found),
    )


def _ages(run_dir: RunDir, *, steps: int) -> Iterator[int]:
    """Yield how many steps the oldest weights of each sample are behind those that it trains."""
    for step in range(1, steps + 1):
        for sample in read_records(run_dir.rollout_file(step), columns=False):
            yield step - 1 - int(sample["weight_versions"][0])


def errors_of(found: Sequence[Compared]) -> list[float]:
    """Return by which share each prediction is off, without its sign."""
    return [abs(each.error) for each in found if not each.is_fitted]


def is_off(found: Sequence[Compared]) -> bool:
    """Say whether the predictions are further off than they may be."""
    errors = errors_of(found)
    return max(errors) > MOST or median(errors) > MEDIAN


def table_of(found: Sequence[Compared]) -> Table:
    """Return a row for each configuration."""
    table = Table("run", "real, s a step", "simulated", "error", "staleness real, simulated", box=None)
    for each in found:
        table.add_row(
            each.name + (" (fitted from)" if each.is_fitted else ""),
            f"{each.real_s:.3f}",
            f"{each.simulated_s:.3f}",
            f"{100 * each.error:+.1f}%",
            f"{each.real_staleness:.2f}, {each.simulated_staleness:.2f}",
        )
    return table


def summary_of(found: Sequence[Compared]) -> str:
    """Return the errors in a line."""
    errors = errors_of(found)
    return f"{len(errors)} runs predicted: median error {100 * median(errors):.1f}%, at most {100 * max(errors):.1f}%"
