"""`RayTrainer`: the `Trainer` protocol over ranks that are Ray actors."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import ray
from slime_core.config.build import BuildContext, Rank
from slime_core.config.derive import num_ranks
from slime_core.devices.cuda_variables import handed_on
from slime_core.errors import TrainerError
from slime_core.protocols import (
    Fingerprint,
    Metrics,
    Place,
    Role,
    Trainer,
    TrainerCapabilities,
    TransferPlan,
)
from slime_core.rewards.workers.supervisor import RewardWorkers
from slime_core.rewards.workers.wire import Setup
from slime_core.rundir.rundir import RunDir
from slime_core.runtime.deadline import within
from slime_core.runtime.phase_times import Phase
from slime_core.samples import TrainBatch
from slime_core.weights.sync import MemoryChannel

from slime_ray.placement.placement import RayPlacement
from slime_ray.process.surroundings import Surroundings, allowed_plugins
from slime_ray.section import RaySection
from slime_ray.trainer.rank import RankProcess, RayChannel
from slime_ray.trainer.ranks import FIRST_CALL, Member, RankActors, RankDied

logger = logging.getLogger(__name__)

#: How messages call the ranks of each role.
_WHO: dict[Role, str] = {"policy": "rank", "critic": "critic rank", "ref": "reference rank"}
#: Seconds that ranks get to close by themselves before they are killed.
_CLOSE_S = 60.0


class RayTrainer:
    """Every rank of a trainer as one: all get the same calls, and rank 0 speaks for all.

    A call that fails or is cancelled ends all ranks, because those that wait for each other cannot be called again.

    Args:
        build: of the run; ranks build themselves from its settings.
        capabilities: of the trainer.
        placement: of the run's processes, begun; it ends with this.
        ranks: which were asked for there.
    """

    def __init__(
        self,
        build: BuildContext,
        *,
        capabilities: TrainerCapabilities,
        placement: RayPlacement,
        ranks: RankActors,
    ) -> None:
        self.capabilities = capabilities
        self._build, self._placement = build, placement
        self._ranks, self._is_started = ranks, False
        self._stage_senders: list[int | None] | None = None

    async def start(self) -> None:
        """Build the trainer on every rank.

        Raises:
            DeadlineError: they are not up in time; names the ranks that are not.
            TrainerError: a process did not start, or what the trainer raises.
        """
        limit, count = self._build.section(RaySection).start_timeout_s, sum(role_sizes(self._build).values())
        await within(limit, f"launcher ray: starting {count} ranks (--ray-start-timeout-s)", self._start())

    async def train(self, batch: TrainBatch) -> Metrics:
        """Run the batch's optimizer steps; every rank is given the whole batch, which is copied once to each machine.

        Where other roles have ranks of their own, these compute values and the log-probs of frozen models while the policy's compute
        theirs; and a critic trains while the policy does.
        """
        ranks = self._started
        batch_ref = ray.put(batch)
        if ranks.roles == ("policy",):
            metrics: Metrics = (await ranks.ask("train", [batch_ref]))[0]
            return metrics
        begun = await ranks.ask_roles("begin", [batch_ref])
        columns = [column for role in ranks.roles[1:] for column in begun[role]]
        credited = await ranks.ask("credit", columns, role="policy")
        learnt = await ranks.ask_roles("learn", credited[0])
        return {name: value for metrics in learnt.values() for name, value in metrics.items()}

    async def phases(self) -> list[Phase]:
        """Return what each rank did in the last `train`, by its own clock from the begin of its call.

        Ranks of other roles' own count on behind those of the policy.
        """
        answers: list[list[Phase]] = await self._started.ask("call", "phases")
        return [dataclasses.replace(phase, rank=i) for i, phases in enumerate(answers) for phase in phases]

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Send by the plan's channel what rank 0 sends; by a channel that is not of this process, ranks do it themselves."""
        if not isinstance(plan.channel, MemoryChannel):
            return await self._send(plan)
        sending = asyncio.ensure_future(self._send(dataclasses.replace(plan, channel=RayChannel())))
        handing = asyncio.ensure_future(self._hand_over(plan.channel))
        try:
            for task in (await asyncio.wait((sending, handing), return_when=asyncio.FIRST_EXCEPTION))[0]:
                task.result()  # raises the error of the one that failed
        finally:
            for task in (sending, handing):
                task.cancel()
            await asyncio.gather(sending, handing, return_exceptions=True)
        return sending.result()

    async def save(self, path: Path, in_background: bool = False) -> None:
        """Write all state into a folder that every rank's machine sees, or begin to; one role after the other."""
        how, ranks = (True,) if in_background else (), self._started
        for role in ranks.roles:
            await ranks.ask("call", "save", path.absolute(), *how, role=role)

    async def written(self, wait: bool) -> bool:
        """Return whether the folder of the save in the background is complete; an error ends the ranks, as any other."""
        complete = await self._started.ask_roles("call", "written", wait)
        return all(complete.values())

    async def load(self, path: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            CheckpointError: the folder is of another model, or is incomplete.
        """
        await self._started.ask("call", "load", path.absolute())

    async def save_hf(self, path: Path, merged: bool = False) -> None:
        """Write the weights as a folder that other programs load."""
        await self._started.ask("call", "save_hf", path.absolute(), merged, role="policy")

    async def offload(self) -> None:
        """Free device memory, on every rank but those of other roles' own, whose GPUs nobody shares."""
        await self._started.ask("call", "offload", role="policy")

    async def offload_weights(self) -> None:
        """Free the device memory of weights, too, on those ranks."""
        await self._started.ask("call", "offload_weights", role="policy")

    async def onload_weights(self) -> None:
        """Take that of the weights back, on those ranks."""
        await self._started.ask("call", "onload_weights", role="policy")

    async def onload(self) -> None:
        """Take device memory back, on those ranks."""
        await self._started.ask("call", "onload", role="policy")

    async def close(self) -> None:
        """End the ranks, release their placement group, and leave the cluster; one that was started for the run ends."""
        is_started, self._is_started = self._is_started, False
        try:
            if is_started and self._ranks.alive:
                async with asyncio.timeout(_CLOSE_S):
                    await self._ranks.ask("call", "close")
        except TimeoutError:
            logger.warning("close: the ranks were killed, which had not closed after %g s", _CLOSE_S)
        finally:
            await self._ranks.kill()
            await self._placement.close()

    @property
    def _started(self) -> RankActors:
        if not self._is_started:
            raise TrainerError("the ranks are not started; call start() first, and nothing after close()")
        return self._ranks

    async def _start(self) -> None:
        await self._placement.reserve()
        self._is_started = True
        found = await self._ranks.ask(FIRST_CALL)
        own_address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it so
        here = self._ranks.found([process for process, _ in found], own_address)
        self._placement.watch(here)
        lock, ranks, begin = self._build.registry.lock(), [], 0
        for role, count in role_sizes(self._build).items():
            first, port = found[begin]
            ranks += [
                Rank(
                    number=i,
                    count=count,
                    role=role,
                    address=first.address,
                    port=port,
                    gpu=self._placement.rank_gpu(begin + i),
                )
                for i in range(count)
            ]
            begin += count
        await self._ranks.ask_each("start", [(rank, lock) for rank in ranks])

    async def _send(self, plan: TransferPlan) -> Fingerprint:
        """Have those ranks send that the plan names, and the others take part; returns what was sent."""
        numbers = await self._senders(plan)
        n_senders = len(numbers) - numbers.count(None)
        plans = [dataclasses.replace(plan, sender=number or 0, n_senders=n_senders) for number in numbers]
        words = [(own, number is not None) for own, number in zip(plans, numbers, strict=True)]
        answers: list[Fingerprint] = await self._started.ask_each("send", words, role="policy")
        sent: Fingerprint = {}
        for number, fingerprints in zip(numbers, answers, strict=True):
            sent |= {} if number is None else fingerprints
        return sent

    async def _senders(self, plan: TransferPlan) -> list[int | None]:
        """Return the number of each of the policy's ranks among those that send; None of the others."""
        machines = self._started.of_machines("policy")
        if plan.senders == "each_machine":
            return machines
        if plan.senders == "each_stage" and self.capabilities.stage_senders:
            if self._stage_senders is None:
                self._stage_senders = await self._started.ask("call", "stage_sender", role="policy")
            return self._stage_senders
        return [0, *[None] * (len(machines) - 1)]

    async def _hand_over(self, channel: MemoryChannel) -> None:
        """Put what rank 0 sends into the engine's channel."""
        from slime_ray.trainer.buckets import unpack  # imports torch

        try:
            while (packed := await self._started.ask_first("next_bucket")) is not None:
                await channel.put(unpack(packed))
        except TrainerError as error:
            if self._ranks.alive and not isinstance(error, RankDied):
                raise
            return  # they died, or are being killed: who asks all ranks says which died first
        await channel.end()


def role_sizes(build: BuildContext) -> dict[Role, int]:
    """Return how many ranks each role has of its own, the policy first; the others are in the policy's."""
    roles: list[Role] = ["policy", *build.settings.cluster.pools]
    return {role: num_ranks(build.settings, role) for role in roles}


def begin_ranks(build: BuildContext, placement: RayPlacement) -> RankActors:
    """Ask for the processes of all ranks, which import what the trainer needs as soon as they run; waits for nothing."""
    cluster, run_dir = build.settings.cluster, RunDir(build.run_dir.absolute())
    passed_on = allowed_plugins() | handed_on(os.environ)
    settings, members = pickle.dumps(build.settings), []
    named = [
        (role, f"{_WHO[role]} {i} of {count}")
        for role, count in role_sizes(build).items()
        for i in range(count)
    ]
    for number, (role, name) in enumerate(named):
        surroundings = Surroundings(
            folder=Path.cwd(),
            import_path=tuple(sys.path),
            environment=passed_on | cluster.train_env_vars,
            log=run_dir.rank_log(number),
            sharing=placement.ranks_beside(number),
        )
        options = placement.rank_options(number)
        actor = ray.remote(RankProcess).options(**options)
        begun = actor.remote(surroundings, placement.gpus_for(number), settings)
        members.append(Member(begun, name, surroundings.log, role))
    return RankActors(members)


class OnRay:
    """Has a run's trainer and its engine's processes on Ray. It is a `slime_core.run.assemble.Placement`, of one run."""

    def __init__(self) -> None:
        self._placement: RayPlacement | None = None
        self._ranks: RankActors | None = None

    def begin(self, build: BuildContext) -> None:
        """Join the cluster, or start it, and ask it for the run's processes.

        Raises:
            TrainerError: no cluster is found.
            ConfigError: the cluster has no GPUs, and the CPU was not asked for; or it is too small.
        """
        self._placement = RayPlacement(build)
        self._placement.begin()
        self._ranks = begin_ranks(build, self._placement)

    def places(self, build: BuildContext) -> dict[int, Place]:
        """Return the places of the engine's processes, to be used once the trainer is started."""
        assert self._placement is not None, "asked before begin()"
        return self._placement.places()

    def host(self, build: BuildContext) -> str:
        """Return the address of this machine by which the others of its cluster know it; the loopback address where there are none."""
        assert self._placement is not None, "asked before begin()"
        return self._placement.host

    def reward_workers(self, build: BuildContext) -> Callable[[Setup, int], RewardWorkers] | None:
        """Return what makes the workers of each reward on machines of the cluster; None where no machines are to have some."""
        if build.section(RaySection).reward_num_nodes is None:
            return None
        assert self._placement is not None, "asked before begin()"
        return self._placement.reward_workers

    def create_trainer(self, build: BuildContext) -> RayTrainer:
        """Return the chosen trainer, whose ranks were begun.

        Its factory is called here too, so that it refuses what it cannot do before one of them is built.
        """
        assert self._placement is not None, "asked before begin()"
        assert self._ranks is not None, "asked before begin()"
        factory = build.registry.resolve("slime.trainers", build.settings.train.train_backend)
        here: Trainer = factory(dataclasses.replace(build, rank=Rank(count=num_ranks(build.settings))))
        return RayTrainer(build, capabilities=here.capabilities, placement=self._placement, ranks=self._ranks)

    async def close(self) -> None:
        """End what was begun, also where no run came of it; may be called twice."""
        if self._ranks is not None:
            await self._ranks.kill()
        if self._placement is not None:
            await self._placement.close()
