"""One request of two engines, which are the test's own: what becomes of one half when the other fails."""

from __future__ import annotations

import asyncio

import pytest
from slime_core.errors import EngineError
from slime_sglang.apart import Pairing, half_arguments, half_environment
from slime_sglang.client import ServerFaultError

from .fake_fleet import PROMPTS, generate_all, right

pytestmark = pytest.mark.timeout(120)


class Half:
    """Answers once it is told to, or ends with this error; an end of the request is an error, too."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended: list[str] = []

    async def read(self, body):
        return await self.answer

    async def write(self):
        await self.answer

    async def control(self, path, body):
        self.ended.append(body["rid"])
        if not self.answer.done():
            self.answer.set_exception(ServerFaultError("it was ended"))


def run_pair(say):
    """Have both halves say something; return the error that the request ends with, and what ends each was sent."""

    async def scenario():
        reader, writer = Half(), Half()
        pairing = Pairing(reader, writer, port=7, room=255)
        say(reader.answer, writer.answer)
        (error,) = await asyncio.gather(pairing.together({}, writer.write()), return_exceptions=True)
        return str(error), reader.ended, writer.ended

    return asyncio.run(scenario())


RID = "000000000000000000000000000000ff"


def test_both_halves_are_told_where_they_meet():
    pairing = Pairing(None, None, port=7, room=255)
    assert pairing.body({"stream": True}) == {
        "stream": True,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 7,
        "bootstrap_room": 255,
        "rid": RID,
    }


def test_a_writer_whose_reader_fails_is_told_to_end():
    def say(reader, writer):
        reader.set_exception(EngineError("the reader ended"))

    assert run_pair(say) == ("the reader ended", [], [RID])


def test_a_writer_whose_reader_never_got_the_request_is_told_to_end():
    def say(reader, writer):
        reader.set_result(None)

    assert run_pair(say) == ("it was ended", [], [RID])


def test_a_reader_whose_writer_fails_is_told_to_end():
    def say(reader, writer):
        writer.set_exception(EngineError("the writer ended"))

    assert run_pair(say) == ("it was ended", [RID], [])


def test_what_the_writer_answered_counts():
    def say(reader, writer):
        reader.set_exception(EngineError("the reader ended"))
        writer.set_result("an answer")

    assert run_pair(say) == ("None", [], [])


def test_each_request_gets_one_engine_of_each_team_and_a_room_of_its_own(fleet_of):
    async def scenario(engine, *workers):
        assert right(await generate_all(engine))
        assert [len(worker.bodies) for worker in workers] == [6, 6, 6, 6]
        read, written = (
            [(body["bootstrap_room"], body["bootstrap_port"]) for worker in team for body in worker.bodies]
            for team in (workers[:2], workers[2:])
        )
        assert sorted(read) == sorted(written)
        assert {room for room, _ in read} == set(range(1, len(PROMPTS) + 1))
        assert len({port for _, port in read}) == 2

    fleet_of(scenario, roles=("prefill", "prefill", "decode", "decode"))


def test_a_paused_team_gets_no_request_until_it_goes_on(fleet_of):
    async def scenario(engine, *workers):
        await engine.pause()
        work = asyncio.create_task(generate_all(engine))
        for seat in engine._seats:
            await seat.engine.probe(timeout_s=10)  # as long as a request would take
        n_asked = sum(len(worker.bodies) for worker in workers)
        await engine.resume()
        return n_asked, right(await work)

    assert fleet_of(scenario, roles=("prefill", "decode")) == (0, True)


def test_arguments_of_a_half_are_its_own_and_the_users():
    given = {"disaggregation_transfer_backend": "nixl", "dtype": "auto"}
    assert half_arguments("prefill", given, bootstrap_port=7, device="cuda") == {
        **given,
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": 7,
    }
    assert half_arguments("decode", {}, bootstrap_port=7, device="cpu") == {
        "disaggregation_transfer_backend": "mooncake_tcp",
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        "disaggregation_mode": "decode",
    }
    waits = half_environment(request_timeout_s=1.5, device="cuda")
    assert waits["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "2"  # SGLang wants whole seconds
