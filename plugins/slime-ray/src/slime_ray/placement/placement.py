"""`RayPlacement`: one placement group for all processes of a run, the GPUs of each, and where its servers are started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from slime_core.config.build import BuildContext
from slime_core.errors import EngineError, TrainerError
from slime_core.protocols import Place, Site
from slime_core.rewards.workers.supervisor import RewardWorkers
from slime_core.rewards.workers.wire import Setup
from slime_core.rundir.rundir import RunDir
from slime_core.runtime.calls import Callee, calling
from slime_core.runtime.daemon_thread import DaemonThread
from slime_core.runtime.processes.command_process import COMMAND

from slime_ray.placement.cluster import connect, joins
from slime_ray.placement.guard import Guard
from slime_ray.placement.machine import Machine
from slime_ray.placement.plan import DevicePlan, Slot, make_plan, needs_of
from slime_ray.placement.room import check_reward_room, check_room, has_gpus, sizes
from slime_ray.process.ends import still_running
from slime_ray.process.failure import killed_for_memory
from slime_ray.process.surroundings import Surroundings
from slime_ray.rewards import RayRewardWorkers
from slime_ray.section import RaySection

logger = logging.getLogger(__name__)

_THREADS = "OMP_NUM_THREADS"
#: Seconds that an actor of a machine gets to end when Ray asks it to, once the servers that it started have ended.
_GONE_S = 2.0
#: Seconds in which the head of a cluster takes a placement group back.
_GIVEN_BACK_S = 5.0


@dataclass(frozen=True)
class Held:
    """What the run has of one machine."""

    actor: Any
    """Handle of its `Machine`; None where no process but ranks is there, and no GPU."""
    address: str = ""
    """IP address."""
    pid_here: int | None = None
    """Process of the actor, where that is on the driver's machine."""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that the run has there; none where it computes on the CPU."""


class RayPlacement:
    """A run's part of a Ray cluster: reserved at once, and given to ranks and servers as the plan says.

    Args:
        build: of the run.
    """

    def __init__(self, build: BuildContext) -> None:
        self._cluster, self._section = build.settings.cluster, build.section(RaySection)
        self._needs = needs_of(build)
        self._run_dir = RunDir(build.run_dir.absolute())
        self._registry = build.registry
        self._reward_cores = build.settings.reward.reward_workers
        self._group: PlacementGroup | None = None
        self._rewards: PlacementGroup | None = None
        self._plan: DevicePlan | None = None
        self._actors: list[Any] = []  # of the machines; None where nothing is there for one to do
        self._machines: list[Held] = []
        self._connected = self._has_gpus = False
        self.host = "127.0.0.1"
        """Address of this machine at which others of the cluster reach it; the loopback address until `begin`, and where there are none."""
        self._guard: Guard | None = None

    def begin(self) -> None:
        """Join the cluster, or start it, and ask it for room and for the actors of its machines; waits for neither.

        Raises:
            TrainerError: no cluster is found.
            ConfigError: it has no GPUs, and the CPU was not asked for; or it is too small, whoever else uses it.
        """
        address = self._section.address
        command = COMMAND.get()
        self._guard = Guard(
            starts_ray=not ray.is_initialized(), is_ending=lambda: command is not None and command.is_ending
        )
        n_hosts = self._section.reward_num_nodes or 0
        self._connected = connect(self._needs.num_gpus + n_hosts * self._reward_cores, address)
        self._has_gpus = has_gpus(self._section.device, is_joined=self._connected and joins(address))
        kind = "GPU" if self._has_gpus else "CPU"
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray leaves it so
        found = sizes(nodes, kind)
        if len(found) > 1:
            self.host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it so
        size = self._cluster.num_gpus_per_node or max([*found, self._needs.largest])
        plan = make_plan(self._needs, gpus_per_node=size)
        check_room(self._needs, plan, found, kind)
        bundles = [{"CPU": float(number), kind: float(number)} for number in plan.gpus]
        self._plan, self._group = plan, placement_group(bundles, strategy="STRICT_SPREAD")
        self._actors = [self._begin_machine(number) for number in range(len(plan.gpus))]
        if n_hosts:
            check_reward_room(n_hosts, self._reward_cores, nodes, taken=plan.gpus)
            self._rewards = placement_group([{"CPU": self._reward_cores}] * n_hosts, strategy="STRICT_SPREAD")

    async def reserve(self) -> None:
        """Wait until the actors of the machines have the room that was asked for.

        Raises:
            TrainerError: one did not start.
        """
        self._machines = list(await asyncio.gather(*map(self._held, range(len(self._actors)))))

    def rank_options(self, number: int) -> dict[str, Any]:
        """Return the options of the actor that is rank `number`; its machine's actor holds the GPUs for it."""
        return {**self._options(self._planned.ranks[number].machine), "num_cpus": 1, "num_gpus": 0}

    def ranks_beside(self, number: int) -> int:
        """Return how many ranks are on the machine of rank `number`, itself among them."""
        machine = self._planned.ranks[number].machine
        return sum(slot.machine == machine for slot in self._planned.ranks)

    def gpus_for(self, number: int) -> Any:
        """Return the ids of the GPUs of a rank as an argument for its actor: they are known once its machine's actor runs."""
        slot = self._planned.ranks[number]
        return self._actors[slot.machine].gpus.remote(slot.gpus) if self._has_gpus else ()

    def rank_gpu(self, number: int) -> str | None:
        """Return the id of the GPU of a rank; None on the CPU."""
        return next(iter(self._ids(self._planned.ranks[number])), None)

    def watch(self, pids: Sequence[int]) -> None:
        """Have ranks of this machine end with the driver, and what starts servers on it."""
        if self._guard is not None:
            own = (held.pid_here for held in self._machines)
            self._guard.watch([*pids, *(pid for pid in own if pid is not None)])

    def places(self) -> dict[int, Place]:
        """Return the places of the engine's processes, by the first GPU of each; they can be used after `reserve`."""
        return {process.first: RayPlace(self, process.first) for process in self._needs.engine.processes}

    def reward_workers(self, setup: Setup, size: int) -> RewardWorkers:
        """Return the workers of a reward, `size` on each machine that has some; they share the cores that are reserved for all rewards."""
        n_hosts, group = self._section.reward_num_nodes or 0, self._rewards
        assert group is not None, "asked before begin()"
        return RayRewardWorkers(
            setup,
            size=size,
            lock=self._registry.lock,
            options=[_options_on(group, number) for number in range(n_hosts)],
            log=lambda number: self._run_dir.rank_log(number).with_name(f"rewards_{number:03}.log"),
            timeout_s=self._section.start_timeout_s,
            watch=self.watch,
        )

    def of_server(self, number: int) -> tuple[Held, tuple[str, ...]]:
        """Return the machine of a process of the engine, and the ids of its GPUs.

        Raises:
            EngineError: nothing is reserved yet, or any more.
        """
        if self._plan is None or not self._machines:
            raise EngineError(
                "the launcher ray has no place for a server: its trainer is not started, or is closed"
            )
        slot = self._plan.servers[number]
        return self._machines[slot.machine], self._ids(slot)

    async def close(self) -> None:
        """Give everything back, and leave the cluster; one that was started for the run ends. May be called twice."""
        machines, self._machines = self._machines, []
        actors, self._actors = self._actors, []
        for actor in actors:
            with contextlib.suppress(RayError):
                if actor is not None:
                    ray.kill(actor)
        for pid in await still_running(
            [held.pid_here for held in machines if held.pid_here is not None], _GONE_S
        ):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        groups, self._group, self._rewards = (self._group, self._rewards), None, None
        for group in groups:
            if group is not None:
                await _remove(group)
        if self._connected:
            ray.shutdown()
            self._connected = False
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    @property
    def _planned(self) -> DevicePlan:
        assert self._plan is not None, "asked before reserve()"
        return self._plan

    def _ids(self, slot: Slot) -> tuple[str, ...]:
        gpus = self._machines[slot.machine].gpus
        return tuple(gpus[number] for number in slot.gpus) if gpus else ()

    def _options(self, machine: int) -> dict[str, Any]:
        assert self._group is not None, "asked before reserve()"
        return {"max_restarts": 0, **_options_on(self._group, machine)}

    def _begin_machine(self, number: int) -> Any:
        """Ask for the actor of a machine; None where nothing is there for it to do."""
        plan, total = self._planned, self._planned.gpus[number]
        if not self._has_gpus and all(slot.machine != number for slot in plan.servers.values()):
            return None
        n_ranks = sum(slot.machine == number for slot in plan.ranks)
        own = {"num_cpus": total - n_ranks, "num_gpus": total if self._has_gpus else 0}
        threads = {_THREADS: os.environ[_THREADS]} if _THREADS in os.environ else {}
        surroundings = Surroundings(
            folder=Path.cwd(),
            import_path=tuple(sys.path),
            environment=threads,
            log=self._run_dir.rank_log(number).with_name(f"machine_{number:03}.log"),
            sharing=1,
        )
        options = {**self._options(number), **own}
        # What kills a server's helpers once this actor has ended is a child of it, too.
        options["runtime_env"]["env_vars"]["RAY_kill_child_processes_on_worker_exit"] = "0"
        return ray.remote(Machine).options(**options).remote(surroundings)

    async def _held(self, number: int) -> Held:
        """Return what the run has of a machine, once its actor runs."""
        actor = self._actors[number]
        if actor is None:
            return Held(None)
        try:
            with calling("room for the run", Callee(f"machine {number} of {len(self._actors)}", _no_stacks)):
                address, pid, gpus = await actor.whereabouts.remote()
        except RayError as error:
            raise TrainerError(
                f"launcher ray: machine {number} of {len(self._actors)} did not start: {killed_for_memory(error) or error}"
            ) from error
        is_here = address == ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it so
        return Held(actor, address, pid if is_here else None, gpus)


def _options_on(group: PlacementGroup, bundle: int) -> dict[str, Any]:
    """Return the options of an actor on one machine of a placement group.

    Ray has its processes, and what they start, yield the cores to all others of a machine (niceness 15), in which the run's have
    deadlines and wait for one another.
    """
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return {"scheduling_strategy": where, "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}}}


async def _remove(group: PlacementGroup) -> None:
    """Give a placement group back, in time: Ray waits for a minute for a head that is gone."""
    thread = DaemonThread("removing the placement group")
    try:
        async with asyncio.timeout(_GIVEN_BACK_S):
            await asyncio.get_running_loop().run_in_executor(thread, remove_placement_group, group)
    except (TimeoutError, RayError) as error:
        logger.warning("close: Ray's head did not take the placement group back: %r", error)
    finally:
        thread.shutdown(wait=False)


class RayPlace:
    """Room for one process of the engine. It is a `slime_core.protocols.Place`.

    Args:
        placement: of the run.
        number: which process: the `first` of its `GpuRange`.
    """

    def __init__(self, placement: RayPlacement, number: int) -> None:
        self._placement, self._number = placement, number

    async def site(self) -> Site:
        """Return what the next process finds there, with ports that are its own."""
        held, gpus = self._placement.of_server(self._number)
        ports = await self._ask("reserve")
        host = "127.0.0.1" if held.pid_here is not None else held.address
        return Site(host, ports, gpus, held.address)

    async def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start a process there."""
        await self._ask("start", list(command), dict(environment), log)

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit status."""
        return int(await self._ask("wait"))

    async def stacks(self) -> str:
        """Return the stacks of it and its helpers, which they write to its log."""
        return str(await self._ask("stacks"))

    async def stop(self) -> None:
        """Terminate it, and kill what is left of it."""
        await self._ask("stop")

    async def kill(self) -> None:
        """Kill it and what it started."""
        await self._ask("kill")

    async def _ask(self, method: str, *args: Any) -> Any:
        held, _ = self._placement.of_server(self._number)
        try:
            return await getattr(held.actor, method).remote(self._number, *args)
        except RayError as error:
            told = killed_for_memory(error) or error
            raise EngineError(f"the machine {held.address} of the run's servers: {method}: {told}") from error


async def _no_stacks() -> str:
    return ""  # its process may not be there yet
