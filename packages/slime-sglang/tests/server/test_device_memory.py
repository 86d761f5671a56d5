"""The order in which a server's device memory is released and taken back."""

from __future__ import annotations

import asyncio

from slime_sglang.server.device_memory import DeviceMemory

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
WEIGHTS, REST = (RESUME, {"tags": ["weights"]}), (RESUME, {"tags": ["kv_cache", "cuda_graph"]})


def calls(scenario):
    """What a scenario over the memory of one server calls, each call taking a turn of the event loop."""
    made = []

    async def call(path, body):
        await asyncio.sleep(0)
        made.append((path, dict(body)))

    asyncio.run(scenario(DeviceMemory(call)))
    return made


def test_weights_come_back_first_and_the_cache_once_whoever_asks():
    async def scenario(memory):
        await memory.release()
        await memory.take_for_weights()
        assert memory.lacks_cache
        await asyncio.gather(memory.take_all(), memory.take_all())
        assert not memory.lacks_cache
        await memory.take_all()

    assert calls(scenario) == [(RELEASE, {}), WEIGHTS, REST]


def test_what_was_not_taken_back_is_before_all_is_released_again():
    """SGLang fails to release what is not there."""

    async def scenario(memory):
        await memory.release()
        await memory.take_for_weights()
        await memory.release()

    assert calls(scenario) == [(RELEASE, {}), WEIGHTS, REST, (RELEASE, {})]
