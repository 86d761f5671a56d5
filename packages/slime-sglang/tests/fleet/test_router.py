"""sglang-router in front of fake workers, and the load balance without it."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from slime_core.errors import EngineError
from slime_core.protocols import SamplingParams
from slime_sglang.fleet.load_balancer import pick
from slime_sglang.fleet.router import Router
from slime_sglang.generation.response import PartialResponse
from slime_sglang.generation.routed_experts import RoutedExpertsFormat
from slime_sglang.http.client import SglangClient
from slime_sglang.settings.section import SglangSection

from ..fake_worker import KEY, FakeWorker

pytestmark = pytest.mark.timeout(120)

PARAMS = SamplingParams(max_new_tokens=3)


@asynccontextmanager
async def routed(policy, folder, *, address=(None, None), key=None, external=()):
    """Yield a started router and two workers that it does not know yet."""
    workers = [FakeWorker(folder), FakeWorker(folder)]
    router = Router(
        policy, address=address, width=64, section=SglangSection(), folder=folder, key=key, external=external
    )
    try:
        for worker in workers:
            await worker.start()
        await router.start()
        yield router, *workers
    finally:
        await router.close()
        for worker in workers:
            await worker.close()


async def ask(router, n, *, session=lambda number: None):
    responses = [PartialResponse([number, 1], PARAMS) for number in range(n)]
    await asyncio.gather(
        *(
            router.extend(response, stream=number % 2 == 0, session_id=session(number))
            for number, response in enumerate(responses)
        )
    )
    return [response.completion("none") for response in responses]


def url(worker):
    return f"http://{worker.address}"


def test_load_spreads_and_follows_workers_that_leave_and_come_back(tmp_path):
    async def scenario():
        async with routed("round_robin", tmp_path) as (router, first, second):
            counts = []
            await router.add(url(first), KEY)
            await router.add(url(second), KEY)
            for change in (None, lambda: router.remove(url(first)), lambda: router.add(url(first), KEY)):
                if change is not None:
                    await change()
                first.answered, second.answered = [], []
                answers = await ask(router, 20)
                assert [answer.tokens[0] for answer in answers] == [number + 1 for number in range(20)]
                counts.append((len(first.answered), len(second.answered)))
            return counts

    assert asyncio.run(scenario()) == [(10, 10), (0, 20), (10, 10)]


def test_how_the_router_greets_a_worker_leaves_nothing_in_the_log_and_what_is_no_request_does(
    tmp_path, caplog
):
    caplog.set_level(logging.DEBUG, "fake_worker")

    async def tell(worker, sent):
        reader, writer = await asyncio.open_connection(*worker.address.split(":"))
        writer.write(sent)
        await reader.read()
        writer.close()

    async def scenario():
        async with routed("round_robin", tmp_path) as (router, first, _second):
            await router.add(url(first), KEY)
            await tell(first, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            greeted = [record for record in caplog.records if record.exc_info]
            await tell(first, b"no request\r\n\r\n")
            return greeted, [record.name for record in caplog.records if record.exc_info]

    assert asyncio.run(scenario()) == ([], ["fake_worker"])


def test_the_router_asks_workers_past_the_proxy_of_the_environment(tmp_path, monkeypatch):
    """Of which it would heed `NO_PROXY=*` for names of hosts, but not for their addresses."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def scenario():
        async with routed("round_robin", tmp_path) as (router, first, _second):
            async with asyncio.timeout(30):
                await router.add(url(first), KEY)
            return await ask(router, 2)

    assert [answer.tokens[0] for answer in asyncio.run(scenario())] == [1, 2]


def test_the_router_still_drops_the_question_for_routes(tmp_path):
    """Fails when it no longer does, and `slime check` need not refuse it in a run that replays routes."""
    asked = PartialResponse([1, 1], PARAMS).request(
        stream=False, experts_format=RoutedExpertsFormat(n_layers=1, topk=2)
    )

    async def scenario():
        async with routed("round_robin", tmp_path) as (router, first, _second):
            await router.add(url(first), KEY)
            await router._client.post("/generate", asked, timeout_s=30)
            return first.bodies

    (body,) = asyncio.run(scenario())
    assert body["return_logprob"]
    assert "return_routed_experts" in asked
    assert "return_routed_experts" not in body


@pytest.mark.parametrize("policy", ["consistent_hashing", "manual"])
def test_a_session_stays_on_one_worker(tmp_path, policy):
    async def scenario():
        async with routed(policy, tmp_path) as (router, first, second):
            await router.add(url(first), KEY)
            await router.add(url(second), KEY)
            for number in range(10):
                first.answered, second.answered = [], []
                await ask(router, 4, session=lambda _, number=number: f"session {number}")
                assert sorted([len(first.answered), len(second.answered)]) == [0, 4]

    asyncio.run(scenario())


def test_a_router_that_runs_already_is_joined_and_left_running(tmp_path):
    async def scenario():
        async with routed("round_robin", tmp_path) as (router, first, _second):
            async with routed("", tmp_path, address=("127.0.0.1", router._port), key=router._key) as (
                joined,
                *_,
            ):
                await joined.add(url(first), KEY)
                await ask(joined, 3)
            assert await router._workers() == []  # which have no part in what others send
            await router.add(url(first), KEY)
            await ask(router, 3)
            return len(first.answered)

    assert asyncio.run(scenario()) == 6


def test_a_router_with_engines_of_others_is_not_joined_and_external_ones_stay(tmp_path):
    async def scenario():
        async with routed("round_robin", tmp_path) as (router, first, _second):
            await router.add(url(first), KEY)
            there = {"address": ("127.0.0.1", router._port), "key": router._key}
            with pytest.raises(EngineError, match=f"also sends requests to {re.escape(url(first))}; wanted"):
                async with routed("", tmp_path, **there):
                    pass
            async with routed("", tmp_path, **there, external=[url(first)]) as (joined, *_):
                await joined.add(url(first), KEY)
                await ask(joined, 2)
            assert [worker["url"] for worker in await router._workers()] == [url(first)]
            return len(first.answered)

    assert asyncio.run(scenario()) == 2


def test_a_router_that_is_started_asks_for_a_key_which_its_command_line_and_its_log_do_not_show(tmp_path):
    async def scenario():
        async with routed("round_robin", tmp_path) as (router, first, _second):
            await router.add(url(first), KEY)
            for key in (None, "nonsense", KEY):
                stranger = SglangClient(router.url, connections=1, retries=0, key=key)
                for method, path in (("GET", "/workers"), ("POST", "/workers"), ("POST", "/generate")):
                    with pytest.raises(EngineError, match=rf"{path}: status 401: "):
                        await stranger.call(method, path, {"url": url(first)}, timeout_s=60)
                await stranger.close()
            assert "/generate" not in first.asked
            await ask(router, 1)
            command = Path(f"/proc/{router._process._process.pid}/cmdline").read_bytes()
            return router._key, command

    key, command = asyncio.run(scenario())
    assert len(key) > 30
    assert b"sglang_router" in command
    assert not [secret for secret in (key, KEY) if secret.encode() in command]
    files = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
    assert len(files) >= 1
    assert not [secret for secret in (key, KEY) for file in files if secret.encode() in file]


def test_a_port_in_use_is_refused_by_the_flag_that_names_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        router = Router("random", address=(None, port), width=1, section=SglangSection(), folder=tmp_path)
        with pytest.raises(EngineError, match=rf"--sglang-router-port: port {port} of this host is in use"):
            asyncio.run(router.start())
        asyncio.run(router.close())


@dataclass
class Engine:
    """What `pick` sees of an engine."""

    name: str
    pending: int = 0


def test_without_a_session_the_engine_with_the_fewest_requests_is_picked():
    engines = [Engine("a", 3), Engine("b", 1), Engine("c", 1)]
    assert pick(engines, None).name == "b"


def test_a_session_is_picked_the_same_engine_until_that_has_more_than_its_share():
    engines = [Engine("a"), Engine("b")]
    home = pick(engines, "session")
    home.pending = 1  # 2 requests with this one, 1.25 x 2 / 2 rounded up is 2: up to 1 may be there already
    assert pick(engines, "session") is home
    home.pending = 3  # 4 with this one: 1.25 x 4 / 2 rounded up is 3
    assert pick(engines, "session") is not home


def test_an_engine_that_leaves_moves_only_its_own_sessions():
    engines = [Engine(name) for name in "abcd"]
    before = {f"session {number}": pick(engines, f"session {number}").name for number in range(200)}
    after = {session: pick(engines[1:], session).name for session in before}
    assert {session for session in before if before[session] != after[session]} == {
        session for session, name in before.items() if name == "a"
    }
    assert min(Counter(before.values()).values()) > 200 / 4 / 2
