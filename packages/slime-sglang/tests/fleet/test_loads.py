"""The load of a fleet over fake workers."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.errors import EngineError
from slime_core.protocols import EngineLoad
from slime_sglang.http.client import ServerFaultError

from ..fake_fleet import PARAMS, WATCHED, until

pytestmark = pytest.mark.timeout(120)


def load(usage, running, waiting):
    return {"token_usage": usage, "num_running_reqs": running, "num_waiting_reqs": waiting}


def test_engines_are_added_up_and_the_fullest_cache_counts(fleet_of):
    async def scenario(engine, first, second):
        first.load, second.load = load(0.2, 3, 0), load(0.7, 5, 2)
        return await engine.current_load()

    wanted = EngineLoad(kv_cache_usage=0.7, running=8, queued=2, replicas=2)
    assert fleet_of(scenario) == wanted


def test_prefill_engines_do_not_count(fleet_of):
    async def scenario(engine, prefill, decode):
        prefill.load, decode.load = load(0.9, 30, 40), load(0.1, 2, 1)
        return await engine.current_load()

    wanted = EngineLoad(kv_cache_usage=0.1, running=2, queued=1)
    assert fleet_of(scenario, roles=("prefill", "decode")) == wanted


def test_without_fault_tolerance_an_engine_that_does_not_tell_is_an_error(fleet_of):
    async def scenario(engine, first, second):
        second.faults["/v1/loads"] = 500
        with pytest.raises(ServerFaultError, match="a fault"):
            await engine.current_load()

    fleet_of(scenario)


def test_retractions_never_fall_when_an_engine_is_lost(fleet_of):
    async def scenario(engine, first, second, spare):
        for worker in (first, second, spare):
            worker.load = load(0.5, 1, 0)
        first.retracted, second.retracted = 5, 2
        for replica in engine._replicas:
            replica.engine._has_metrics = True
        before = await engine.current_load()
        first.faults["/generate"] = 500
        first.faults["/health_generate"] = 500
        await asyncio.gather(*(engine.generate([number, 7], PARAMS) for number in range(4)))
        await until(lambda: engine._replicas[0].engine.url.endswith(spare.address))
        await until(lambda: engine._replicas[0].is_ready)
        second.faults["/v1/loads"] = 500
        after = await engine.current_load()
        second.faults.clear()
        return before, after, await engine.current_load()

    before, after, last = fleet_of(scenario, spare=True, **WATCHED)
    assert before == EngineLoad(kv_cache_usage=0.5, running=2, queued=0, retractions=7, replicas=2)
    assert after == EngineLoad(kv_cache_usage=0.5, running=1, queued=0, retractions=7, replicas=1)
    assert last == EngineLoad(kv_cache_usage=0.5, running=2, queued=0, retractions=7, replicas=2)


def test_a_fleet_none_of_whose_engines_tells_says_so(fleet_of):
    async def scenario(engine, first, second):
        first.faults["/v1/loads"] = second.faults["/v1/loads"] = 500
        with pytest.raises(EngineError, match="a fault"):
            await engine.current_load()

    fleet_of(scenario, **WATCHED)
