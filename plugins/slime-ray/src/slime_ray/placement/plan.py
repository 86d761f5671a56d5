"""Which machine, and which of its GPUs, each rank of the trainer and each process of the engine gets: a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_core.config.build import BuildContext
from slime_core.config.factories import engine_factory
from slime_core.errors import ConfigError, Problem
from slime_core.protocols import EngineGpus, GpuRange, Role

_RANKS = "cluster.actor_num_gpus_per_node"
_SIZE = "cluster.num_gpus_per_node"


@dataclass(frozen=True)
class Needs:
    """What a run needs of a cluster. Without GPUs, its GPUs are cores."""

    num_nodes: int
    """Machines that train."""
    ranks_per_node: int
    """Ranks of the trainer on each of them, a GPU each."""
    engine: EngineGpus = field(default_factory=EngineGpus)
    """GPUs of the engine's processes."""
    colocate: bool = False
    """Whether these are the GPUs of the policy's ranks, not others."""
    pools: Mapping[Role, tuple[int, int]] = field(default_factory=dict)
    """(machines, ranks on each) of each role that has ranks of its own, in their order."""

    @property
    def num_gpus(self) -> int:
        """GPUs of everything together."""
        shared = self.colocate and bool(self.engine.processes)
        return self.num_ranks + self.num_pooled + (0 if shared else self.engine.total)

    @property
    def num_ranks(self) -> int:
        """Ranks of the policy."""
        return self.num_nodes * self.ranks_per_node

    @property
    def num_pooled(self) -> int:
        """Ranks of all other roles' own."""
        return sum(machines * per_machine for machines, per_machine in self.pools.values())

    @property
    def largest(self) -> int:
        """GPUs that one machine has at least: those of its ranks, or of the largest process of the engine."""
        pooled = (per_machine for _, per_machine in self.pools.values())
        return max(self.ranks_per_node, *pooled, *(process.count for process in self.engine.processes), 1)


@dataclass(frozen=True)
class Slot:
    """Where one process is."""

    machine: int
    """Which of the run's machines, from 0."""
    gpus: tuple[int, ...]
    """Which of the GPUs that the run has there, from 0."""


@dataclass(frozen=True)
class DevicePlan:
    """Where everything is: one bundle of one placement group for each machine."""

    gpus: tuple[int, ...]
    """GPUs that the run reserves on each machine; machines that train come first."""
    ranks: tuple[Slot, ...]
    """Of each rank: the policy's, then those of each pool."""
    servers: Mapping[int, Slot]
    """Of each process of the engine, by its `GpuRange.first`."""


def needs_of(build: BuildContext) -> Needs:
    """Return what a run needs."""
    cluster = build.settings.cluster
    return Needs(
        cluster.actor_num_nodes,
        cluster.actor_num_gpus_per_node,
        engine_factory(build.settings.rollout, build.registry).gpus(build),
        cluster.colocate,
        cluster.pools,
    )


def make_plan(needs: Needs, *, gpus_per_node: int | None = None) -> DevicePlan:
    """Place ranks and the engine's processes.

    Rank r of the policy is on machine r / ranks_per_node. Ranks of another role's own have the GPUs that follow, one role after the other:
    on each machine that has room for all that one of the role's machines is to have, in their order, and then on further ones. A colocated
    engine has the policy's GPUs, in their order. Otherwise its GPUs follow those of all ranks on the first machine, and go on on the next; a process for
    which a machine has too few left is on the next one.

    Args:
        needs: of the run.
        gpus_per_node: GPUs of a machine that the run may take; None for as many as it needs.

    Raises:
        ConfigError: a process is larger than a machine, or a colocated engine does not fit the ranks.
    """
    size = needs.num_gpus if gpus_per_node is None else gpus_per_node
    shares = needs.colocate and bool(needs.engine.processes)
    if problems := [*_too_large(needs, size), *(_misfits(needs) if shares else ())]:
        raise ConfigError(problems)
    per = needs.ranks_per_node
    ranks = tuple(Slot(number // per, (number % per,)) for number in range(needs.num_ranks))
    taken = [per] * needs.num_nodes
    for machines, per_machine in needs.pools.values():
        ranks += _pool(machines, per_machine, taken, size)
    if shares:
        return DevicePlan(
            tuple(taken),
            ranks,
            {one.first: _on_ranks(one, per) for one in needs.engine.processes},
        )
    servers = _take(needs.engine, taken, size)
    return DevicePlan(tuple(taken), ranks, servers)


def _pool(machines: int, per_machine: int, taken: list[int], size: int) -> tuple[Slot, ...]:
    """Return the slots of a role's own ranks on GPUs that nobody has; `taken`, of each machine, grows by them."""
    slots: list[Slot] = []
    machine = 0
    for _ in range(machines):
        while machine < len(taken) and taken[machine] + per_machine > size:
            machine += 1
        if machine == len(taken):
            taken.append(0)
        slots += [Slot(machine, (taken[machine] + number,)) for number in range(per_machine)]
        taken[machine] += per_machine
        machine += 1
    return tuple(slots)


def _on_ranks(process: GpuRange, per_node: int) -> Slot:
    """Return the slot of a colocated process: the ranks' GPUs, counted over all machines."""
    machine, first = divmod(process.first, per_node)
    return Slot(machine, tuple(range(first, first + process.count)))


def _take(engine: EngineGpus, taken: list[int], size: int) -> dict[int, Slot]:
    """Return the slots of an engine's processes on GPUs that nobody has; `taken`, of each machine, grows by them."""
    slots: dict[int, Slot] = {}
    machine = end = 0
    for process in (*engine.processes, GpuRange(engine.total, 0)):
        for count in (*[1] * (process.first - end), process.count):  # GPUs before it are left unused
            while taken[machine] + count > size:
                machine += 1
                if machine == len(taken):
                    taken.append(0)
            first = taken[machine]
            taken[machine] += count
        if process.count:
            slots[process.first] = Slot(machine, tuple(range(first, first + process.count)))
        end = process.first + process.count
    return slots


def _too_large(needs: Needs, size: int) -> list[Problem]:
    """Return what no machine of `size` GPUs has room for."""
    problems = []
    given = {_RANKS: needs.ranks_per_node}
    given |= {
        f"cluster.{role}_num_gpus_per_node": per_machine for role, (_, per_machine) in needs.pools.items()
    }
    for setting, per_machine in given.items():
        if per_machine > size:
            found = f"{per_machine}, with {size} GPUs a machine"
            problems.append(Problem(setting, found, f"at most {size}", f"--num-gpus-per-node says {size}"))
    largest = max((process.count for process in needs.engine.processes), default=0)
    if largest > size:
        found = f"{largest} GPUs of one server, with {size} GPUs a machine"
        wanted, todo = (
            f"at most {size}",
            "a process of a server is on one machine; --rollout-num-gpus-per-engine says how many GPUs a server has",
        )
        problems.append(Problem(_SIZE, found, wanted, todo))
    return problems


def _misfits(needs: Needs) -> list[Problem]:
    """Return why a colocated engine does not fit the ranks' GPUs."""
    per, total = needs.ranks_per_node, needs.engine.total
    if total != needs.num_ranks:
        found = f"it, {needs.num_ranks} GPUs of the trainer and {total} of the engine"
        todo = "leave --rollout-num-gpus out, or drop --colocate"
        return [Problem("cluster.colocate", found, "as many of both", todo)]
    return [
        Problem(
            "cluster.colocate",
            f"a server of GPUs {process.first} to {process.first + process.count - 1}, with {per} ranks a machine",
            f"servers of which none is on two machines: a divisor of {per} as --rollout-num-gpus-per-engine",
        )
        for process in needs.engine.processes
        if process.first // per != (process.first + process.count - 1) // per
    ]


def table(needs: Needs, plan: DevicePlan) -> list[str]:
    """Return who is where, a line a machine: `machine 0, 2 GPUs: 0 rank 0; 1 policy 0`. GPUs count from the first that the run has there."""
    names = {process.first: process.name or f"server {process.first}" for process in needs.engine.processes}
    who = [f"rank {i}" for i in range(needs.num_ranks)]
    for role, (machines, per_machine) in needs.pools.items():
        who += [f"{role} {i}" for i in range(machines * per_machine)]
    there: list[tuple[str, Slot]] = list(zip(who, plan.ranks, strict=True))
    there += [(names[first], slot) for first, slot in plan.servers.items()]
    lines = []
    for machine, total in enumerate(plan.gpus):
        by_gpu: dict[int, list[str]] = {gpu: [] for gpu in range(total)}
        for name, slot in there:
            for gpu in slot.gpus if slot.machine == machine else ():
                by_gpu[gpu].append(name)
        told = "; ".join(f"{gpu} {' and '.join(who) or 'nobody'}" for gpu, who in by_gpu.items())
        lines.append(f"machine {machine}, {total} GPU{'s' * (total != 1)}: {told}")
    return lines
