"""Clients that drop off, flood, replay keys or use those of others: refused, logged, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from urllib.parse import urlsplit

import aiohttp
import pytest
from slime_agents.section import AgentsSection
from slime_core.errors import EngineError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.group import reset
from slime_core.samples import Sample, Status

from ..byte_chat import ByteChat, SayingEngine
from .running import GivenAgent, check_tape, played, run_agent

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


async def post(base_url, key, path="chat/completions", body=CHAT, **more):
    async with (
        aiohttp.ClientSession() as client,
        client.post(
            f"{base_url}/{path}", json=body, headers={"Authorization": f"Bearer {key}"}, **more
        ) as answer,
    ):
        return answer.status, await answer.json()


def test_a_program_is_not_told_an_earlier_attempt_at_its_task():
    """A surplus session that begins anew has what it left in the metadata."""
    tasks = []

    async def agent(base_url, api_key, task):
        tasks.append(task)
        assert (await post(base_url, api_key))[0] == 200
        return 1.0

    async def main():
        made = GivenAgent(agent, AgentsSection())
        ctx = GenerateContext(
            engine=SayingEngine(lambda text: "y"), tokenizer=ByteChat(), over=asyncio.Event()
        )
        params = SamplingParams(max_new_tokens=2000, seed=0)
        sample = Sample(
            index=0, group_index=0, prompt=[{"role": "user", "content": "x"}], metadata={"row": 1}
        )
        try:
            done = await made(ctx, sample, params)
            last = done[-1] if isinstance(done, list) else done
            assert {"row", "tape", "agent"} <= last.metadata.keys()
            await made(ctx, reset(last), params)
        finally:
            await made.close()

    asyncio.run(main())
    assert [task["metadata"] for task in tasks] == [{"row": 1}] * 2


def test_keys_of_others_wrong_keys_and_ended_sessions_are_refused_and_logged(caplog):
    seen, over = {}, {}

    async def agent(base_url, api_key, task):
        i = task["index"]
        seen[i] = (base_url, api_key)
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        status, _ = await post(base_url, seen[1 - i][1])
        assert status == 401
        assert (await post(base_url, "guessed"))[0] == 401
        assert (await post(base_url, ""))[0] == 401
        assert (await post(base_url, api_key))[0] == 200
        while over.setdefault(i, 0) == 0 and i == 1 and not over.get("first"):
            await asyncio.sleep(0.001)
        if i == 1:
            over["replayed"] = (await post(*seen[0]))[0]
        return 1.0

    async def watched(base_url, api_key, task):
        try:
            return await agent(base_url, api_key, task)
        finally:
            if task["index"] == 0:
                asyncio.get_running_loop().call_later(0.1, over.__setitem__, "first", True)

    done, engine = asyncio.run(run_agent(watched, lambda text: "y", n=2, reward="program"))
    assert [samples[0].reward for samples in done] == [1.0, 1.0]
    assert over["replayed"] == 401
    assert [samples[0].metadata["agent"]["refused"]["wrong_key"] for samples in done] == [3, 3]
    assert "the key of another session" in caplog.text
    assert "a wrong key" in caplog.text
    assert "an unknown session" in caplog.text
    assert len(engine.requests) == 2


def test_a_client_that_drops_off_gets_its_turn_when_it_asks_again():
    engine = SayingEngine(lambda text: "an answer")

    async def agent(base_url, api_key, task):
        engine.gate.clear()
        with pytest.raises(TimeoutError):
            await post(base_url, api_key, timeout=aiohttp.ClientTimeout(total=0.2))
        engine.gate.set()
        await asyncio.sleep(0.05)
        status, body = await post(base_url, api_key)
        assert body["choices"][0]["message"]["content"] == "an answer"
        return float(status == 200)

    (samples,), _ = asyncio.run(run_agent(agent, None, engine=engine, reward="program", max_turns=1))
    assert samples[0].reward == 1.0, samples[0].metadata["agent"]
    assert len(engine.requests) == 1
    check_tape(samples, engine)


class HoldingEngine(SayingEngine):
    """Holds answers back, and counts the requests that came."""

    def __init__(self):
        super().__init__(lambda text: "an answer")
        self.gate.clear()
        self.n_came, self.came = 0, asyncio.Condition()

    async def generate(self, tokens, params, **more):
        async with self.came:
            self.n_came += 1
            self.came.notify_all()
        return await super().generate(tokens, params, **more)

    async def has(self, n):
        async with self.came:
            await self.came.wait_for(lambda: self.n_came >= n)


async def asked_and_dropped(base_url, api_key, engine):
    """Ask by a connection that is closed as soon as the turn is being generated."""
    url, body = urlsplit(base_url), json.dumps(CHAT)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    await engine.has(1)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_asks_again_while_its_turn_is_generated_waits_for_that_turn(stream):
    engine = HoldingEngine()

    async def agent(base_url, api_key, task):
        await asked_and_dropped(base_url, api_key, engine)
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            again = asyncio.create_task(
                client.post(f"{base_url}/chat/completions", json={**CHAT, "stream": stream})
            )
            async with client.get(f"{base_url}/models"):  # answered after the other one has come
                engine.gate.set()
            answer = await again
            assert "an answer" in await answer.text()
            return float(answer.status == 200)

    (samples,), _ = asyncio.run(run_agent(agent, None, engine=engine, reward="program", max_turns=1))
    (sample,) = samples
    assert sample.reward == 1.0, sample.metadata["agent"]
    assert (sample.metadata["agent"]["turns"], sample.metadata["agent"]["forks"]) == (1, [])
    assert len(engine.requests) == 1
    check_tape(samples, engine)


def test_two_clients_that_ask_the_same_side_by_side_get_a_turn_each():
    engine = HoldingEngine()

    async def agent(base_url, api_key, task):
        asking = [asyncio.create_task(post(base_url, api_key)) for _ in range(2)]
        await engine.has(2)
        engine.gate.set()
        (_, one), (_, other) = await asyncio.gather(*asking)
        return float(one["id"] != other["id"])

    (samples,), _ = asyncio.run(run_agent(agent, None, engine=engine, reward="program", max_turns=2))
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    assert len(engine.requests) == 2
    check_tape(samples, engine)


def test_a_flood_is_refused_beyond_the_limit_and_ends_the_session_where_it_goes_on():
    engine = SayingEngine(lambda text: "y")

    async def agent(base_url, api_key, task):
        engine.gate.clear()
        asking = [asyncio.create_task(post(base_url, api_key)) for _ in range(20)]
        while len([one for one in asking if one.done()]) < 17:
            await asyncio.sleep(0.01)
        engine.gate.set()
        statuses = sorted(status for status, _ in await asyncio.gather(*asking))
        assert statuses == [200] * 3 + [429] * 17
        while True:
            await post(base_url, api_key, body={"messages": "none"})

    (samples,), _ = asyncio.run(
        run_agent(agent, None, engine=engine, reward="program", max_requests_at_once=3, max_refusals=50)
    )
    record = samples[0].metadata["agent"]
    assert record["refused"]["too_many_at_once"] == 17
    assert record["ended_by"] == "refusals"
    check_tape(samples, engine)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"messages": 1}', b"\xff", b'{"messages": [{"role": "wizard"}]}', b"{" * 5000],
)
def test_requests_that_are_none_are_refused(body):
    async def agent(base_url, api_key, task):
        headers = {"x-api-key": api_key}
        async with aiohttp.ClientSession() as client:
            for path in ("chat/completions", "responses", "messages"):
                async with client.post(f"{base_url}/{path}", data=body, headers=headers) as answer:
                    assert answer.status == 400
                    assert (await answer.json())["error"]["message"]
            async with client.get(f"{base_url}/models", headers=headers) as answer:
                assert (await answer.json())["data"][0]["id"] == "policy"
            async with client.post(f"{base_url}/embeddings", json={}, headers=headers) as answer:
                assert answer.status == 404
        assert (await post(base_url, api_key))[0] == 200
        return 1.0

    samples, _ = played(agent, lambda text: "y", reward="program")
    assert samples[0].reward == 1.0, samples[0].metadata["agent"]


def test_a_request_that_is_too_large_is_refused():
    async def agent(base_url, api_key, task):
        body = {"messages": [{"role": "user", "content": "x" * 20_000}]}
        assert (await post(base_url, api_key, body=body))[0] == 413
        return 1.0 if (await post(base_url, api_key))[0] == 200 else 0.0

    samples, _ = played(agent, lambda text: "y", reward="program", max_request_mb=0.01)
    assert samples[0].reward == 1.0, samples[0].metadata["agent"]


def test_an_abort_gives_the_sample_back_as_it_was():
    async def agent(base_url, api_key, task):
        while True:
            await post(base_url, api_key)

    samples, _ = played(agent, lambda text: None, reward="program")
    assert samples[0].status is Status.ABORTED
    assert samples[0].tokens == []


def test_a_program_that_asks_nothing_more_is_ended_once_the_rollout_has_all_that_it_needs():
    over = asyncio.Event()

    async def agent(base_url, api_key, task):
        await post(base_url, api_key)
        over.set()
        await asyncio.sleep(1000)

    samples, _ = played(agent, lambda text: "y", over=over, reward="program", timeout_s=20)
    assert (samples[0].status, samples[0].tokens) == (Status.ABORTED, [])


@pytest.mark.parametrize("error", [EngineError("the server is gone"), KeyError("its page is gone")])
def test_an_engine_that_fails_ends_the_run_by_its_own_error(error):
    async def agent(base_url, api_key, task):
        while True:
            await post(base_url, api_key)

    with pytest.raises(type(error), match="is gone"):
        played(agent, lambda text: error, reward="program")


def test_an_agent_that_asks_nothing_fails_by_name_and_one_that_raises_has_no_reward():
    async def silent(base_url, api_key, task):
        return 1.0

    async def raises(base_url, api_key, task):
        await post(base_url, api_key)
        raise ValueError("lost my way")

    samples, _ = played(silent, lambda text: "y", reward="program")
    assert samples[0].status is Status.FAILED
    assert "had no turn" in samples[0].failure
    samples, _ = played(raises, lambda text: "y", reward="program")
    assert samples[0].reward == 0.0
    assert samples[0].metadata["agent"]["output"] == "ValueError: lost my way"


def test_a_hanging_agent_is_cut_off_and_a_posted_reward_counts():
    async def hangs(base_url, api_key, task):
        await post(base_url, api_key)
        assert (await post(base_url, api_key, "reward", {"reward": "much"}))[0] == 400
        assert (await post(base_url, api_key, "reward", {"reward": 0.25}))[0] == 200
        assert (await post(base_url, api_key, "reward", {"reward": 0.5}))[0] == 400
        await asyncio.sleep(1000)

    samples, _ = played(hangs, lambda text: "y", reward="http", timeout_s=5)
    assert samples[0].metadata["agent"]["ended_by"] == "timeout"
    assert (samples[0].status, samples[0].reward) == (Status.TRUNCATED, 0.25)


def test_attackers_among_sessions_cost_the_others_nothing(caplog):
    """Of 60 sessions at once every sixth asks by the key of another, one floods, one drops off and one sends nonsense."""
    seen: dict[int, tuple[str, str]] = {}

    async def honest(base_url, api_key, i):
        messages = [{"role": "user", "content": f"task {i}."}]
        for _ in range(3):
            status, body = await post(base_url, api_key, body={"messages": messages})
            said = body["choices"][0]["message"]["content"]
            assert (status, said) == (200, f"answer to {i}.")
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]

    async def agent(base_url, api_key, task):
        i = task["index"]
        seen[i] = (base_url, api_key)
        while len(seen) < 60:
            await asyncio.sleep(0.001)
        if i % 6 == 1:
            assert (await post(base_url, seen[i - 1][1]))[0] == 401
            assert (await post(seen[i - 1][0], api_key))[0] == 401
        elif i % 6 == 2:
            await asyncio.gather(*(post(base_url, api_key, body={"messages": 1}) for _ in range(30)))
        elif i % 6 == 3:
            body = {"messages": [{"role": "user", "content": f"task {i}."}]}
            with contextlib.suppress(TimeoutError):
                await post(base_url, api_key, body=body, timeout=aiohttp.ClientTimeout(total=0.001))
        elif i % 6 == 4:
            assert (await post(base_url, api_key, body=[{"role": "wizard"}]))[0] == 400
        await honest(base_url, api_key, i)
        return 1.0

    def say(text):
        return f"answer to {text.partition('task ')[2].partition('.')[0]}."

    done, engine = asyncio.run(run_agent(agent, say, n=60, reward="program"))
    assert [samples[0].reward for samples in done] == [1.0] * 60
    refused = [sum(samples[0].metadata["agent"]["refused"].values()) for samples in done]
    assert refused == [1, 1, 30, 0, 1, 0] * 10
    assert caplog.text.count("the key of another session") == 20
    assert len(engine.requests) == 60 * 3
    check_tape([sample for samples in done for sample in samples], engine)
