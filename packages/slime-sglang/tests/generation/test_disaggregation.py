"""One request of a prefill and a decode engine, which are the test's own: what becomes of it at one when the other fails."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.errors import EngineError
from slime_sglang.generation.disaggregation import PrefillDecodePair
from slime_sglang.http.client import ServerFaultError
from slime_sglang.server.disaggregation import disaggregation_arguments, disaggregation_environment

from ..fake_fleet import PROMPTS, generate_all, right

pytestmark = pytest.mark.timeout(120)


class FakeEngine:
    """Answers or fails once the test says so; an abort is a failure."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.aborted: list[str] = []

    async def prefill(self, body):
        return await self.answer

    async def generate(self):
        await self.answer

    async def control(self, path, body):
        self.aborted.append(body["rid"])
        if not self.answer.done():
            self.answer.set_exception(ServerFaultError("it was aborted"))


def run_pair(say):
    """Have both engines answer or fail; return the error that the request ends with, and the aborts that each was sent."""

    async def scenario():
        prefill_engine, decode_engine = FakeEngine(), FakeEngine()
        pair = PrefillDecodePair(prefill_engine, decode_engine, bootstrap_address="10.0.0.2:7", room=255)
        say(prefill_engine.answer, decode_engine.answer)
        (error,) = await asyncio.gather(pair.run({}, decode_engine.generate()), return_exceptions=True)
        return str(error), prefill_engine.aborted, decode_engine.aborted

    return asyncio.run(scenario())


RID = "000000000000000000000000000000ff"


def test_both_engines_are_told_where_they_meet():
    pair = PrefillDecodePair(None, None, bootstrap_address="10.0.0.2:7", room=255)
    assert pair.body({"stream": True}) == {
        "stream": True,
        "bootstrap_host": "10.0.0.2",
        "bootstrap_port": 7,
        "bootstrap_room": 255,
        "rid": RID,
    }


def test_decoding_is_aborted_where_prefill_fails():
    def say(prefill_engine, decode_engine):
        prefill_engine.set_exception(EngineError("the prefill engine ended"))

    assert run_pair(say) == ("the prefill engine ended", [], [RID])


def test_decoding_is_aborted_where_prefill_was_never_sent():
    def say(prefill_engine, decode_engine):
        prefill_engine.set_result(None)

    assert run_pair(say) == ("it was aborted", [], [RID])


def test_prefill_is_aborted_where_decoding_fails():
    def say(prefill_engine, decode_engine):
        decode_engine.set_exception(EngineError("the decode engine ended"))

    assert run_pair(say) == ("it was aborted", [RID], [])


def test_the_answer_is_that_of_the_decode_engine():
    def say(prefill_engine, decode_engine):
        prefill_engine.set_exception(EngineError("the prefill engine ended"))
        decode_engine.set_result("an answer")

    assert run_pair(say) == ("None", [], [])


def test_each_request_gets_one_engine_of_each_pool_and_a_room_of_its_own(fleet_of):
    async def scenario(engine, *workers):
        assert right(await generate_all(engine))
        assert [len(worker.bodies) for worker in workers] == [6, 6, 6, 6]
        prefill, decode = (
            [(body["bootstrap_room"], body["bootstrap_port"]) for worker in pool for body in worker.bodies]
            for pool in (workers[:2], workers[2:])
        )
        assert sorted(prefill) == sorted(decode)
        assert {room for room, _ in prefill} == set(range(1, len(PROMPTS) + 1))
        assert len({port for _, port in prefill}) == 2

    fleet_of(scenario, roles=("prefill", "prefill", "decode", "decode"))


def test_paused_pools_get_no_request_until_they_are_resumed(fleet_of):
    async def scenario(engine, *workers):
        await engine.pause()
        work = asyncio.create_task(generate_all(engine))
        for replica in engine._replicas:
            await replica.engine.probe(timeout_s=10)  # as long as a request would take
        n_asked = sum(len(worker.bodies) for worker in workers)
        await engine.resume()
        return n_asked, right(await work)

    assert fleet_of(scenario, roles=("prefill", "decode")) == (0, True)


def test_arguments_of_a_disaggregated_engine_are_its_own_and_the_users():
    given = {"disaggregation_transfer_backend": "nixl", "dtype": "auto"}
    assert disaggregation_arguments("prefill", given, bootstrap_port=7, device="cuda") == {
        **given,
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": 7,
    }
    assert disaggregation_arguments("decode", {}, bootstrap_port=7, device="cpu") == {
        "disaggregation_transfer_backend": "mooncake_tcp",
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        "disaggregation_mode": "decode",
    }
    waits = disaggregation_environment(host="10.0.0.2", request_timeout_s=1.5, device="cuda")
    assert waits["SGLANG_HOST_IP"] == "10.0.0.2"
    assert waits["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "2"  # SGLang wants whole seconds
