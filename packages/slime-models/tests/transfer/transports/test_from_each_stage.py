"""Transport `nccl`, by gloo, with several pipeline stages of the trainer: each sends its own weights, in turn, update after update."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.ranks.receiver import RankReceiver
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.transports.nccl import TRANSPORT

from ..updates import bits, plan_of, tensors

#: Which tensors each of three stages has.
STAGES = ["a", "bc", "d"]


def drawn(seed):
    return tensors(seed) | {"d": torch.full((7,), float(seed))}


def joined(rank, channel, number):
    """What a rank gets: (name, bytes), in the order in which they came."""
    return [
        (name, bits(tensor).clone())
        for bucket in rank.buckets(channel, number)
        for name, tensor in bucket.tensors.items()
    ]


class Trainer:
    """Pipeline stages that send to two ranks of servers."""

    def __init__(self, storage):
        self.receiver = TRANSPORT.create_receiver(storage)
        self.senders = [WeightSender(asyncio.to_thread, Registry()) for _ in STAGES]
        self.ranks = [RankReceiver(torch.device("cpu")) for _ in range(2)]

    def update(self, version, values, *, buckets=None, timeout_s=60):
        """Send; returns (what each sender returns or raises, what each rank gets or raises)."""

        async def own_buckets(stage):
            for name in STAGES[stage]:
                yield [(name, values[name])], {name: fingerprint(values[name])}

        buckets = buckets or own_buckets
        channel = self.receiver.open(version)
        plan = plan_of("nccl", channel, version, senders="each_stage", n_senders=len(STAGES))
        assert plan.sends_stage_alone

        async def receive(arriving):
            try:
                update = await arriving
            except asyncio.CancelledError:
                return []
            update.begin(len(self.ranks))
            try:
                return await asyncio.gather(
                    *(
                        asyncio.to_thread(joined, rank, update.channel, update.take_ranks(1))
                        for rank in self.ranks
                    ),
                )
            except WeightSyncError as error:
                update.call_off()
                return [error]

        async def send(stage, arriving):
            try:
                return await self.senders[stage].send(dataclasses.replace(plan, sender=stage), buckets(stage))
            except ZeroDivisionError as error:  # what an engine does then
                arriving.cancel()
                self.receiver.give_up(plan)
                return error

        async def all_of_them():
            arriving = asyncio.ensure_future(self.receiver.arrive(plan))
            return await asyncio.gather(
                *(send(stage, arriving) for stage in range(len(STAGES))), receive(arriving)
            )

        *sent, received = asyncio.run(asyncio.wait_for(all_of_them(), timeout_s))
        return sent, received


def has(found, values):
    return [name for name, _ in found] == list(values) and all(
        data.equal(bits(values[name])) for name, data in found
    )


def test_every_rank_gets_the_tensors_of_all_stages_one_stage_after_the_other(storage):
    trainer, groups = Trainer(storage), set()
    for version in ("1", "2", "3"):
        values = drawn(int(version))
        sent, received = trainer.update(version, values)
        assert sent == [{name: fingerprint(values[name]) for name in names} for names in STAGES]
        assert all(has(found, values) for found in received)
        for rank in trainer.ranks:
            assert [group.member.n_turns for group in rank._groups] == [3] * 3
            groups |= {id(group) for group in rank._groups}
    assert len(groups) == 2 * 3  # which stayed


def test_a_stage_makes_its_first_buckets_while_it_waits_for_its_turn(storage):
    """The first stage holds its last bucket back until the third has made both of its own that can be in flight."""
    trainer, values, has_made = Trainer(storage), drawn(1), threading.Event()

    async def buckets(stage):
        if stage == 0:
            assert await asyncio.to_thread(has_made.wait, 30)
        for name in STAGES[stage]:
            yield [(name, values[name])], {name: fingerprint(values[name])}
        if stage == 2:
            has_made.set()

    _, received = trainer.update("1", values, buckets=buckets)
    assert all(has(found, values) for found in received)


@pytest.mark.parametrize("failing", range(3))
def test_where_a_stage_fails_the_others_end_too_and_the_next_update_arrives(storage, failing):
    trainer, values = Trainer(storage), drawn(1)

    async def buckets(stage):
        if stage == failing:
            raise ZeroDivisionError
        for name in STAGES[stage]:
            yield [(name, values[name])], {name: fingerprint(values[name])}

    trainer.update("1", values)
    sent, received = trainer.update("2", values, buckets=buckets)
    assert isinstance(sent[failing], ZeroDivisionError)
    assert all(isinstance(each, WeightSyncError) for each in received)
    again = drawn(3)
    _, received = trainer.update("3", again)
    assert all(has(found, again) for found in received)
