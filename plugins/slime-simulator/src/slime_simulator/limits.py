"""What limits a run: simulated again with one part of it made cheaper at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slime_core.config.derive import FULLY_ASYNC
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry

from slime_simulator.costs.costs import UpdateCosts
from slime_simulator.costs.traces import Trace
from slime_simulator.scenario import Scenario

#: Steps that each of these simulations takes at most.
_STEPS = 8
#: Indices of samples that percentiles are taken of.
_SAMPLED = 4096
#: Share of the time below which a part does not count as what limits.
_LEAST = 0.02


@dataclass(frozen=True)
class Limit:
    """A part of a run, and what making it cheaper would save."""

    part: str
    change: str
    """What was changed to find out."""
    saved: float
    """Share of the time that this saves."""

    def __str__(self) -> str:
        """Say so in a few words."""
        return f"{self.part} ({self.change}: {-100 * self.saved:+.0f}% time)"


@dataclass(frozen=True)
class Cut:
    """A trace whose longest responses are cut."""

    trace: Trace
    longest: int

    def prompt_tokens(self, index: int) -> int:
        """Return the tokens of the prompt."""
        return self.trace.prompt_tokens(index)

    def response_tokens(self, index: int) -> int:
        """Return the tokens of the response, `longest` at most."""
        return min(self.longest, self.trace.response_tokens(index))


def limits(scenario: Scenario, registry: Registry) -> list[Limit]:
    """Return what limits a run, most first: parts that would save a fiftieth of the time or more."""
    steps = min(_STEPS, scenario.settings.run.num_rollout or _STEPS)
    short = scenario.having(run__num_rollout=steps)
    wall_s = short.simulate(registry).wall_s
    found = [
        Limit(part, change, 1 - other.simulate(registry).wall_s / wall_s)
        for part, change, other in _cheaper(short)
    ]
    return sorted((each for each in found if each.saved >= _LEAST), key=lambda each: -each.saved)


def _cheaper(scenario: Scenario) -> Iterator[tuple[str, str, Scenario]]:
    costs, cluster, settings = scenario.costs, scenario.cluster, scenario.settings
    trainer = replace(
        costs.trainer, token_gpu_s=costs.trainer.token_gpu_s / 2, fixed_s=costs.trainer.fixed_s / 2
    )
    yield "the trainer", "twice as fast", replace(scenario, costs=replace(costs, trainer=trainer))
    more = replace(scenario, cluster=replace(cluster, replicas=2 * cluster.replicas))
    yield "the engine's throughput", "twice the replicas", more
    lengths = sorted(scenario.trace.response_tokens(index) for index in range(_SAMPLED))
    cut = Cut(scenario.trace, lengths[_SAMPLED * 95 // 100])
    change = f"cut at the 95th percentile, {cut.longest} tokens"
    yield "the longest responses", change, replace(scenario, trace=cut)
    free = replace(scenario, costs=replace(costs, update=UpdateCosts()))
    yield "weight updates", "free", free
    if means(settings.run.loop, FULLY_ASYNC):
        bound = 1 if settings.rollout.max_staleness is None else settings.rollout.max_staleness
        further = scenario.having(rollout__max_staleness=bound + 1)
        yield "the bound on staleness", f"{bound + 1} instead of {bound}", further
