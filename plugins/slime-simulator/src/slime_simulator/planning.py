"""Planning a run: simulated with many splits of its GPUs, loops, bounds on staleness and numbers of requests in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from slime_core.config.derive import FULLY_ASYNC
from slime_core.plugins.own_name import means
from slime_core.plugins.registry import Registry

from slime_simulator.scenario import Scenario
from slime_simulator.simulation import Simulated

#: Shares of the GPUs that train.
_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
#: A plan that is younger or simpler wins over one that is faster by less than this.
_CLOSE = 0.02


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A way to run, and what it would do."""

    scenario: Scenario
    found: Simulated

    @property
    def flags(self) -> str:
        """Flags of `slime train` that choose loop and staleness, and the number of GPUs of each half."""
        settings, cluster = self.scenario.settings, self.scenario.cluster
        words = [f"--loop {settings.run.loop}"]
        if settings.cluster.colocate:
            words.append("--colocate")
        if means(settings.run.loop, FULLY_ASYNC):
            words.append(f"--max-staleness {settings.rollout.max_staleness}")
            words += ["--rollout-in-completion-order"] * settings.rollout.rollout_in_completion_order
        per_node = max(n for n in range(1, 9) if cluster.trainer_gpus % n == 0)
        nodes = cluster.trainer_gpus // per_node
        words.append(f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {per_node}")
        words.append(f"--rollout-num-gpus {cluster.replicas * cluster.gpus_per_replica}")
        if cluster.gpus_per_replica > 1:
            words.append(f"--rollout-num-gpus-per-engine {cluster.gpus_per_replica}")
        return " ".join(words)

    @property
    def slots(self) -> int:
        """Requests that a replica decodes together."""
        return self.scenario.costs.engine.slots


def candidates(
    scenario: Scenario, *, gpus: int, bounds: Sequence[int], slots: Sequence[int]
) -> Iterator[Scenario]:
    """Yield the ways to run: GPUs shared, or split so that both halves get some.

    Args:
        scenario: of which all but what is tried stays as it is.
        gpus: of both halves together.
        bounds: bounds on staleness of the loop `fully-async`; those under which the weights are sent too seldom are left
            out, if there are others.
        slots: requests that a replica decodes together.
    """
    per_replica = scenario.cluster.gpus_per_replica
    least = scenario.settings.train.update_weights_interval - 1
    bounds = [bound for bound in bounds if bound >= least] or bounds
    for n in slots:
        engine = replace(scenario.costs.engine, slots=n)
        base = replace(scenario, costs=replace(scenario.costs, engine=engine))
        everywhere = replace(base.cluster, replicas=gpus // per_replica, trainer_gpus=gpus)
        shared = base.having(cluster__colocate=True, run__loop="sync", rollout__max_staleness=None)
        yield replace(shared, cluster=everywhere)
        for trainer_gpus in splits(gpus, per_replica):
            cluster = replace(
                base.cluster, replicas=(gpus - trainer_gpus) // per_replica, trainer_gpus=trainer_gpus
            )
            apart = replace(base.having(cluster__colocate=False), cluster=cluster)
            yield apart.having(run__loop="one-step-off", rollout__max_staleness=None)
            for bound in bounds:
                yield apart.having(
                    run__loop="fully-async",
                    rollout__max_staleness=bound,
                    rollout__rollout_in_completion_order=True,
                )


def splits(gpus: int, gpus_per_replica: int) -> list[int]:
    """Return numbers of GPUs that may train: about the shares that are tried, the engine's the rest in whole replicas."""
    found = set()
    for share in _SHARES:
        replicas = max(1, round(gpus * (1 - share) / gpus_per_replica))
        if (trainer_gpus := gpus - replicas * gpus_per_replica) >= 1:
            found.add(trainer_gpus)
    return sorted(found)


def plans(ways: Iterable[Scenario], registry: Registry) -> list[Plan]:
    """Return the plans, the best first: the fastest, and of those that are about as fast the one whose samples are younger."""
    found = [Plan(scenario=way, found=way.simulate(registry)) for way in ways]
    found.sort(key=lambda plan: plan.found.wall_s)
    ranked: list[Plan] = []
    while found:
        close = [each for each in found if each.found.wall_s <= found[0].found.wall_s * (1 + _CLOSE)]
        best = min(close, key=lambda plan: (plan.found.staleness_max, plan.slots, plan.found.wall_s))
        found.remove(best)
        ranked.append(best)
    return ranked
