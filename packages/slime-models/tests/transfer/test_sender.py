"""`WeightSender`: choosing a transport, and quantising what is sent."""

from __future__ import annotations

import asyncio

import pytest
import torch
from slime_core.errors import WeightSyncError
from slime_core.plugins.registry import Registry
from slime_core.weights.sync import MemoryChannel
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.meeting import BroadcastChannel, call_off, open_store
from slime_models.transfer.sender import WeightSender

from .updates import plan_of, send


def test_an_unknown_transport_is_refused_by_name():
    wanted = r"version 7: slime.transports: no plugin is named 'pigeon'; installed: cuda-ipc, disk, disk-delta, distributed, distributed-delta, memory"
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


def test_fingerprints_that_are_missing_are_made_of_what_is_sent():
    channel, tensors = MemoryChannel(), {"given": torch.ones(2), "missing": torch.arange(3.0)}

    async def buckets():
        yield [*tensors.items()], {"given": 5}

    async def scenario():
        sender = WeightSender(asyncio.to_thread, Registry())
        sending = asyncio.create_task(sender.send(plan_of("memory", channel), buckets()))
        async for _ in channel.buckets():
            announced = dict(channel.fingerprints)
        return announced, await sending

    wanted = {"given": 5, "missing": fingerprint(tensors["missing"])}
    assert asyncio.run(scenario()) == (wanted, wanted)


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


def test_the_first_bucket_is_made_while_the_update_begins_and_goes_with_it():
    store, made = open_store("127.0.0.1", 60), []
    channel = BroadcastChannel(
        host="127.0.0.1", port=store.port, key="k", secret="s", n_receivers=1, timeout_s=60
    )

    async def buckets():
        made.append(0)
        yield [("0", torch.ones(2))], {"0": 0}
        made.append(1)

    async def scenario():
        sender = WeightSender(asyncio.to_thread, Registry())
        sending = asyncio.create_task(sender.send(plan_of("distributed", channel), buckets()))
        while not made:
            await asyncio.sleep(0)
        assert not sending.done()  # no receiver has come
        call_off(store, channel)
        with pytest.raises(WeightSyncError, match="the receiving side called it off"):
            await sending
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == set()
    assert made == [0]
