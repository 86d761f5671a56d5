"""Two real servers behind the router: killed and stopped at work, what becomes of the requests, and who takes over.

The tests share the servers, and run in their order: each leaves one fault behind.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import aiohttp
import pytest
from slime_core.weights.sync import sync_weights

from ..fake_fleet import begun
from ..sender import Sender
from .greedy import GREEDY, LONG, PROMPTS, assert_generates, assert_greedy, group_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

INTERVAL_S, DEADLINE_S = 2, 30


def sender_of(model, **options):
    return Sender({name: parameter.detach() for name, parameter in model.named_parameters()}, **options)


@pytest.fixture(scope="module")
def pair(served_by_flags, model_path, tmp_path_factory):
    """A started fleet of two servers behind a router, one restart each."""
    folder = tmp_path_factory.mktemp("sglang-pair")
    flags = {
        "rollout-num-gpus": 2,
        "router-policy": "round_robin",
        "rollout-health-check-interval": INTERVAL_S,
        "rollout-health-check-timeout": DEADLINE_S,
        "rollout-engine-restarts": 1,
        "sglang-max-total-tokens": 4096,
        "sglang-max-running-requests": 8,
        "sglang-stream-interval": 8,
    }
    yield from served_by_flags(model_path, folder, flags, "--use-fault-tolerance")


@pytest.fixture
def check_holds(pair, log_probs_of):
    """Checks that an engine generates what a model does."""

    return lambda engine, model: pair.run(assert_generates(engine, model, log_probs_of))


def shares(pair, *logs):
    """Return how many of eight requests at once each server answers, by their logs."""

    def answered():
        return [
            (pair.log / log).read_text(errors="replace").count('"POST /generate HTTP/1.1" 200')
            for log in logs
        ]

    async def scenario():
        answers = await asyncio.gather(*(pair.engine.generate(prompt, GREEDY) for prompt in PROMPTS))
        while sum(answered()) < sum(before) + len(PROMPTS):  # a server logs after it has answered
            await asyncio.sleep(0.1)
        return answers

    before = answered()
    answers, after = pair.run(scenario()), answered()
    return [new - old for new, old in zip(after, before, strict=True)], answers


async def generated(engine):
    """Return how many tokens a server has generated."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as reply:
        text = await reply.text()
    counts = re.findall(r"^sglang:generation_tokens_total{.*} (\S+)$", text, re.MULTILINE)
    return sum(map(float, counts))


def test_two_servers_share_the_load_and_both_are_the_newest_model(pair, tiny_llama, check_holds):
    sender = sender_of(tiny_llama(1))
    pair.run(sync_weights(sender, pair.engine, version="1", timeout_s=240, transport="disk-delta"))

    counts, answers = shares(pair, "server-0.log", "server-1.log")
    assert counts == [4, 4]
    assert all(answer.metadata["timings"]["e2e_latency"] > 0 for answer in answers)
    assert all("queue_time" in answer.metadata["timings"] for answer in answers)
    for replica in pair.engine._replicas:
        check_holds(replica.engine, tiny_llama(1))


def test_a_server_killed_over_an_update_loses_no_token_and_comes_back_with_the_new_weights(
    pair, tiny_llama, check_holds, living, log_probs_of
):
    replica = pair.engine._replicas[0]
    group = group_of(replica)
    sender = sender_of(tiny_llama(2), midway=lambda: os.killpg(group, signal.SIGKILL))

    async def scenario():
        tasks = await begun(pair.engine, PROMPTS, LONG)
        await sync_weights(sender, pair.engine, version="2", timeout_s=240, transport="distributed")
        assert pair.engine._replicas[1].engine.weight_version == "2"
        return await asyncio.gather(*tasks)

    answers = pair.run(scenario())
    models = {"1": tiny_llama(1).double(), "2": tiny_llama(2).double()}
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_greedy(prompt, answer, models, log_probs_of)
        assert answer.metadata["weight_versions"][0]["version"] == "1"  # what arrived before is kept
    assert living(group) == []

    async def back():
        while replica.state != "serving":
            await asyncio.sleep(0.2)

    pair.run(back(), timeout_s=1000)
    assert group_of(replica) != group
    check_holds(replica.engine, tiny_llama(2))
    assert shares(pair, "server-0-restart-1.log", "server-1.log")[0] == [4, 4]


def test_a_server_that_hangs_is_killed_in_time_and_its_requests_go_on_elsewhere(
    pair, tiny_llama, check_holds, living, log_probs_of
):
    replica, other = pair.engine._replicas
    group = group_of(replica)

    async def scenario():
        before = await generated(other.engine)
        tasks = await begun(pair.engine, PROMPTS, LONG, n_tokens=40)
        os.killpg(group, signal.SIGSTOP)
        begin = time.monotonic()
        while replica.state == "serving":
            await asyncio.sleep(0.1)
        seconds, answers = time.monotonic() - begin, await asyncio.gather(*tasks)
        while replica.state != "gone":  # until it is killed
            await asyncio.sleep(0.1)
        return seconds, answers, await generated(other.engine) - before

    seconds, answers, n_tokens = pair.run(scenario(), timeout_s=1000)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_greedy(prompt, answer, {"2": tiny_llama(2).double()}, log_probs_of)
    assert n_tokens < LONG.max_new_tokens * len(
        PROMPTS
    )  # what the first had generated was not generated again
    assert seconds < 4 * (INTERVAL_S + DEADLINE_S)  # without checks: the request's deadline, an hour
    assert living(group) == []  # a stopped process holds its memory
    assert (replica.state, pair.engine._replicas[1].state) == ("gone", "serving")
    check_holds(pair.engine, tiny_llama(2))


def test_prometheus_finds_the_servers_that_are_there(pair):
    assert [path.name for path in sorted(Path(pair.log).glob("*.targets.json"))] == [
        "router.targets.json",
        "server-1.targets.json",
    ]
