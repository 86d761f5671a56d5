"""Which ranks of the trainer send weights, and what each is told, with answers in the place of processes."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError
from slime_core.protocols import TrainerCapabilities, TransferPlan
from slime_core.weights.sync import MemoryChannel
from slime_ray.trainer import ranks as rank_actors
from slime_ray.trainer.ranks import Member, RankActors, RankDied
from slime_ray.trainer.trainer import RayTrainer

#: What each of four ranks of two pipeline stages says, on two machines.
STAGES, MACHINES = [0, None, 1, None], [0, None, None, 1]


class Ranks:
    """Answers as the actors of ranks do: a rank's fingerprint is of a tensor of its own."""

    def __init__(self):
        self.asked, self.words = [], []

    def of_machines(self, role):
        return MACHINES

    async def ask(self, method, *args, role=None):
        self.asked.append((method, *args))
        return STAGES

    async def ask_each(self, method, words, *, role=None):
        self.words = words
        return [{f"of rank {rank}": rank} for rank in range(len(words))]


def sent(senders, *, stage_senders=True, n_updates=1):
    """Send; returns the ranks, the fingerprints, and (number or None, how many send) that each rank was told."""
    ranks = Ranks()
    capabilities = TrainerCapabilities(stage_senders=stage_senders)
    trainer = RayTrainer(None, capabilities=capabilities, placement=None, ranks=ranks)
    trainer._is_started = True
    plan = TransferPlan(transport="t", version="1", dtype="float32", senders=senders, channel="there")
    for _ in range(n_updates):
        fingerprints = asyncio.run(trainer.send(plan))
    return ranks, fingerprints, [(own.sender if sends else None, own.n_senders) for own, sends in ranks.words]


@pytest.mark.parametrize(
    ("senders", "numbers"),
    [("first", [0, None, None, None]), ("each_machine", MACHINES), ("each_stage", STAGES)],
)
def test_who_sends(senders, numbers):
    _, fingerprints, told = sent(senders)
    count = len(numbers) - numbers.count(None)
    assert told == [(number, count) for number in numbers]
    assert fingerprints == {
        f"of rank {rank}": rank for rank, number in enumerate(numbers) if number is not None
    }


def test_ranks_are_asked_once_which_of_them_send_their_stage():
    ranks, _, _ = sent("each_stage", n_updates=2)
    assert ranks.asked == [("call", "stage_sender")]


def test_rank_0_sends_all_where_the_trainer_knows_no_stages():
    ranks, _, told = sent("each_stage", stage_senders=False)
    assert told == [(0, 1), (None, 1), (None, 1), (None, 1)]
    assert not ranks.words[0][0].sends_stage_alone
    assert ranks.asked == []


class Method:
    """A method of an actor."""

    def __init__(self, remote):
        self.remote = remote


class DyingRank:
    """Of the two ranks of a run the second dies while it sends."""

    def __init__(self, number):
        self.number, self.is_killed = number, asyncio.Event()
        self.send, self.next_bucket = Method(self._send), Method(self._next_bucket)

    async def _send(self, plan, sends):
        if self.number == 0:
            await self.is_killed.wait()
        raise RayActorError()

    async def _next_bucket(self):
        return [("weight", np.zeros(2))]


def test_a_rank_that_dies_while_the_engine_takes_a_bucket_is_named(monkeypatch):
    """The others are killed meanwhile, which takes a moment: who wants the next bucket finds none to ask."""
    slow = subprocess.Popen(["sleep", "1000"])  # in the place of the process of rank 0

    async def send():
        actors = [DyingRank(0), DyingRank(1)]
        later = asyncio.get_running_loop().call_later

        def kill(actor):
            actor.is_killed.set()
            later(0.3, slow.kill)

        monkeypatch.setattr(ray, "kill", kill)
        monkeypatch.setattr(rank_actors, "_is_rank", lambda pid: True)
        members = [
            Member(actor, f"rank {actor.number} of 2", Path("nowhere"), pid_here=pid)
            for actor, pid in zip(actors, (slow.pid, None), strict=True)
        ]
        trainer = RayTrainer(
            None, capabilities=TrainerCapabilities(), placement=None, ranks=RankActors(members)
        )
        trainer._is_started = True
        channel = MemoryChannel()

        async def receive():
            async for _ in channel.buckets():
                await asyncio.sleep(0.1)

        receiving = asyncio.ensure_future(receive())
        try:
            plan = TransferPlan(
                transport="memory", version="1", dtype="float32", senders="first", channel=channel
            )
            await trainer.send(plan)
        finally:
            receiving.cancel()

    try:
        with pytest.raises(RankDied, match=r"^rank 1 of 2 died during send"):
            asyncio.run(send())
    finally:
        slow.kill()
        slow.wait()
