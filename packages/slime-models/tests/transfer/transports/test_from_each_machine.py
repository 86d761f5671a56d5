"""Transport `cuda-ipc` with ranks of the trainer on several machines: who sends to whom, update after update."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.ranks import membership, sender
from slime_models.transfer.ranks.receiver import RankReceiver
from slime_models.transfer.sender import WeightSender
from slime_models.transfer.transports.cuda_ipc import TRANSPORT

from ..updates import bits, buckets, plan_of, tensors

#: Where the code that runs is, as `this_container` says: all of it is on this machine.
MACHINE = contextvars.ContextVar("machine")


@pytest.fixture(autouse=True)
def machines(monkeypatch):
    """Returns where the senders are; a test changes it."""
    of_senders = ["one", "two"]

    def placed(function):
        def called(before, plan, *rest):
            MACHINE.set(of_senders[plan.sender])
            return function(before, plan, *rest)

        return called

    monkeypatch.setattr(membership, "this_container", MACHINE.get)
    for name in ("announce_sender", "group_of_sender"):
        monkeypatch.setattr(sender, name, placed(getattr(sender, name)))
    return of_senders


def joined(machine, rank, channel, number):
    """Name and bytes of what a rank gets on a machine."""
    MACHINE.set(machine)
    found = {}
    for bucket in rank.buckets(channel, number):
        found |= {name: bits(tensor).clone() for name, tensor in bucket.tensors.items()}
    return found


class Trainer:
    """Two ranks, each on a machine of its own, that send to ranks of servers."""

    def __init__(self, storage):
        self.receiver = TRANSPORT.create_receiver(storage)
        self.senders = [WeightSender(asyncio.to_thread, Registry()) for _ in range(2)]

    def update(self, version, values, ranks):
        """Send `values[i]` by sender i to (machine, rank) pairs; returns what each of these gets, or raises."""
        plan = plan_of("cuda-ipc", self.receiver.open(version), version, senders="each_machine", n_senders=2)

        async def receive():
            update = await self.receiver.arrive(plan)
            update.begin(len(ranks))
            working = [
                asyncio.to_thread(joined, machine, rank, update.channel, update.take_ranks(1))
                for machine, rank in ranks
            ]
            return await asyncio.gather(*working, return_exceptions=True)

        async def both():
            sending = [
                each.send(dataclasses.replace(plan, sender=number), buckets(own))
                for number, (each, own) in enumerate(zip(self.senders, values, strict=True))
            ]
            *sent, received = await asyncio.wait_for(asyncio.gather(*sending, receive()), 60)
            for own, found in zip(values, sent, strict=True):
                assert found == {name: fingerprint(tensor) for name, tensor in own.items()}
            return received

        return asyncio.run(both())


def has(found, values):
    return found.keys() == values.keys() and all(found[name].equal(bits(values[name])) for name in values)


def new_rank():
    return RankReceiver(torch.device("cpu"))


def test_each_machines_servers_get_the_bytes_of_the_rank_there(storage):
    """The senders' weights differ here, as those of a trainer do not, to tell whose have come."""
    trainer, ranks = Trainer(storage), [("two", new_rank()), ("one", new_rank()), ("two", new_rank())]
    groups = set()
    for version in ("1", "2", "3"):
        own = [tensors(10 + int(version)), tensors(20 + int(version))]
        received = trainer.update(version, own, ranks)
        assert [
            has(found, own[machine == "two"]) for found, (machine, _) in zip(received, ranks, strict=True)
        ]
        groups |= {id(rank._groups[0]) for _, rank in ranks}
        members = [rank._groups[0].member for _, rank in ranks]
        assert [(member.number, member.size) for member in members] == [(1, 3), (1, 2), (2, 3)]
        assert members[0].key == members[2].key != members[1].key
    assert len(groups) == len(ranks)  # which stayed


def test_a_sender_without_servers_on_its_machine_has_no_group_until_there_are_some(storage):
    trainer, here, there = Trainer(storage), ("one", new_rank()), ("two", new_rank())
    for version, ranks in (("1", [here, there]), ("2", [there]), ("3", [here, there]), ("4", [here])):
        own = [tensors(10 + int(version)), tensors(20 + int(version))]
        received = trainer.update(version, own, ranks)
        assert all(
            has(found, own[machine == "two"]) for found, (machine, _) in zip(received, ranks, strict=True)
        )


def test_of_two_senders_on_a_machine_the_first_sends(storage, machines):
    machines[:] = ["one", "one"]
    trainer, ranks, own = (
        Trainer(storage),
        [("one", new_rank()), ("one", new_rank())],
        [tensors(1), tensors(2)],
    )
    assert all(has(found, own[0]) for found in trainer.update("1", own, ranks))


def test_a_server_on_a_machine_without_a_rank_of_the_trainer_is_refused_by_name(storage):
    trainer, ranks, own = Trainer(storage), [("three", new_rank()), ("two", new_rank())], [tensors(1)] * 2
    refused, found = trainer.update("1", own, ranks)
    assert isinstance(refused, WeightSyncError)
    assert "no rank of the trainer is on the machine and in the container of this server" in str(refused)
    assert has(found, own[1])
    received = trainer.update(
        "2", own, [("one", ranks[0][1]), ranks[1]]
    )  # and can be used where there is one
    assert all(has(found, own[0]) for found in received)
