"""The load of a server from its answers, and of a real one from what it runs."""

from __future__ import annotations

import asyncio
import re

import pytest
from slime_core.errors import EngineError
from slime_core.protocols import EngineLoad
from slime_sglang.server.load import server_load

COUNTERS = """\
# HELP sglang:num_retracted_requests_total Total number of retracted requests.
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:num_retracted_requests_total{engine_type="unified",model_name="a b",tp_rank="1"} 4.0
# TYPE sglang:num_retracted_reqs gauge
sglang:num_retracted_reqs{model_name="m"} 90.0
"""


def rank(usage, running, waiting, **sections):
    return {
        "token_usage": usage,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        **{name: dict(values) for name, values in sections.items()},
    }


def test_ranks_are_added_up_and_the_fullest_cache_counts():
    counted = {"loads": [rank(0.25, 3, 1), rank(0.5, 4, 0)]}
    wanted = EngineLoad(kv_cache_usage=0.5, running=7, queued=1 + 2, retractions=7)
    assert server_load(counted, COUNTERS, waiting_here=2) == wanted


def test_what_is_being_transferred_to_a_decode_server_does_not_queue():
    counted = {"loads": [rank(0.5, 4, 9, disaggregation={"decode_transfer_queue_reqs": 6})]}
    assert server_load(counted, "").queued == 3


def test_a_server_that_has_counted_nothing_yet_is_idle():
    assert server_load({"loads": []}, "") == EngineLoad()


@pytest.mark.parametrize("counted", [None, {}, {"loads": [{}]}, {"loads": [rank(None, 1, 1)]}, [1]])
def test_an_answer_that_is_not_sglangs_is_refused(counted):
    with pytest.raises(EngineError, match=re.escape("/v1/loads")):
        server_load(counted, "")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_servers_load_is_what_it_runs_and_what_waits_for_it(serving, endless):
    """The engine sends the server four requests at once; a token more in the cache is a 65,536th of it."""
    engine = serving.engine

    async def read_until(condition):
        while not condition(load := await engine.current_load()):
            await asyncio.sleep(0.05)
        return load

    async def scenario():
        idle = await read_until(lambda load: load.running == 0)
        asked = [asyncio.create_task(engine.generate([5, 6, 7, number], endless)) for number in range(6)]
        busy = await read_until(lambda load: load.running == 4)
        later = await read_until(lambda load: load.kv_cache_usage > busy.kv_cache_usage + 100 / 65536)
        await engine.abort()
        answers = await asyncio.gather(*asked)
        return idle, busy, later, answers, await read_until(lambda load: load.running == 0)

    idle, busy, later, answers, last = serving.run(scenario())
    assert (busy.running, busy.queued, busy.retractions, busy.replicas) == (4, 2, 0, 1)
    assert sum(len(answer.tokens) for answer in answers) / 65536 >= later.kv_cache_usage - 0.0001 - 16 / 65536
    assert (idle.queued, last.queued, last.retractions) == (0, 0, 0)
    assert max(idle.kv_cache_usage, last.kv_cache_usage) <= 0.0001
