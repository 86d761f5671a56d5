"""`WeightSender`: choosing a transport, and quantising what is sent."""

from __future__ import annotations

import asyncio

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.weights.sync import MemoryChannel
from slime_models.transfer.sender import WeightSender

from .updates import plan_of, send


def test_an_unknown_transport_is_refused_by_name():
    wanted = r"version 7: slime.transports: no plugin is named 'pigeon'; installed: disk, disk-delta, distributed, distributed-delta, memory"
    with pytest.raises(WeightSyncError, match=wanted):
        send(WeightSender(asyncio.to_thread, Registry()), plan_of("pigeon", None), {})


def test_the_next_bucket_is_made_while_one_is_on_its_way_and_no_more():
    channel, made = MemoryChannel(), []

    async def buckets():
        for number in range(4):
            made.append(number)
            yield [(str(number), torch.ones(2))], {str(number): number}

    async def scenario():
        sender = WeightSender(asyncio.to_thread, Registry())
        sending = asyncio.create_task(sender.send(plan_of("memory", channel), buckets()))
        seen = []
        async for bucket in channel.buckets():
            for _ in range(100):  # nothing here waits for anything but this task
                await asyncio.sleep(0)
            seen.append((bucket[0][0], len(made)))
        return seen, await sending, sender.last_bytes

    seen, sent, n_bytes = asyncio.run(scenario())
    assert seen == [("0", 2), ("1", 3), ("2", 4), ("3", 4)]
    assert (sent, n_bytes) == ({"0": 0, "1": 1, "2": 2, "3": 3}, 4 * 8)


def test_a_trainer_that_fails_while_a_bucket_is_on_its_way_sends_no_more_of_it():
    channel = MemoryChannel()

    async def buckets():
        yield [("0", torch.ones(2))], {"0": 0}
        raise RuntimeError("no more")

    async def scenario():
        sender = WeightSender(asyncio.to_thread, Registry())
        with pytest.raises(RuntimeError, match="no more"):
            await sender.send(plan_of("memory", channel), buckets())
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == set()
