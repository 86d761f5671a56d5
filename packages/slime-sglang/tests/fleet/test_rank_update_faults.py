"""Two real servers whose ranks receive updates themselves: killed and stopped between updates and within, and what they hold then.

The tests share the servers, and run in their order: each leaves one fault behind.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from functools import partial

import pytest
from slime_core.weights.sync import sync_weights
from slime_models.transfer.fingerprint import fingerprint

from ..fake_fleet import begun
from ..sender import Sender
from .greedy import GREEDY, LONG, PROMPTS, assert_generates, assert_greedy, group_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


class InParts(Sender):
    """Sends a tensor in each bucket, and calls `midway` before the middle one."""

    async def _buckets(self):
        for number, (name, tensor) in enumerate(self.tensors.items()):
            if number == len(self.tensors) // 2:
                self._midway()
            yield [(name, tensor)], {name: fingerprint(tensor)}


def sender_of(model, midway=lambda: None):
    return InParts({name: parameter.detach() for name, parameter in model.named_parameters()}, midway)


@pytest.fixture(scope="module")
def pair(served_by_flags, model_path, tmp_path_factory):
    """A started fleet of two servers, two restarts each."""
    folder = tmp_path_factory.mktemp("sglang-ranks")
    flags = {
        "rollout-num-gpus": 2,
        "update-weight-transport": "nccl",
        "rollout-health-check-interval": 2,
        "rollout-health-check-timeout": 30,
        "rollout-engine-restarts": 2,
        "sglang-max-total-tokens": 4096,
        "sglang-max-running-requests": 8,
        "sglang-stream-interval": 8,
    }
    yield from served_by_flags(model_path, folder, flags, "--use-fault-tolerance")


@pytest.fixture
def check_holds(log_probs_of):
    """Checks that an engine generates what a model does."""
    return partial(assert_generates, log_probs_of=log_probs_of)


async def update(pair, sender, version):
    """Bring a sender's weights to all servers, which prove them."""
    await sync_weights(sender, pair.engine, version=version, timeout_s=240, transport="nccl")


async def becomes(replica, state):
    while replica.state != state:
        await asyncio.sleep(0.2)


def check_answers(answers, models, log_probs_of):
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_greedy(prompt, answer, models, log_probs_of)


def test_a_server_killed_between_updates_comes_back_waits_and_gets_the_weights_alone(
    pair, tiny_llama, check_holds, living, log_probs_of
):
    replica, other = pair.engine._replicas
    group, sender = group_of(replica), sender_of(tiny_llama(1))

    async def scenario():
        await update(pair, sender, "1")
        tasks = await begun(pair.engine, PROMPTS, LONG)
        os.killpg(group, signal.SIGKILL)
        check_answers(await asyncio.gather(*tasks), {"1": tiny_llama(1).double()}, log_probs_of)
        await becomes(replica, "waiting")
        answers = await asyncio.gather(*(pair.engine.generate(prompt, GREEDY) for prompt in PROMPTS))
        assert {answer.metadata["replica"] for answer in answers} == {other.name}

        await pair.engine.weights_wanted("1")
        tasks = await begun(pair.engine, PROMPTS[:1], LONG)  # the other server is not paused
        await update(pair, sender, "1")
        assert replica.state == "serving"
        (answer,) = await asyncio.gather(*tasks)
        assert "weight_versions" not in answer.metadata or len(answer.metadata["weight_versions"]) == 1
        for each in (replica, other):
            await check_holds(each.engine, tiny_llama(1))

        await update(pair, sender_of(tiny_llama(2)), "2")
        for each in (replica, other):
            await check_holds(each.engine, tiny_llama(2))

    pair.run(scenario(), timeout_s=1000)
    assert living(group) == []


def test_a_server_killed_within_an_update_is_lost_and_the_other_takes_it_again(
    pair, tiny_llama, check_holds, log_probs_of, caplog
):
    replica, other = pair.engine._replicas
    group, kills = group_of(replica), [signal.SIGKILL]

    def kill_once():
        if kills:
            os.killpg(group, kills.pop())

    async def scenario():
        tasks = await begun(pair.engine, PROMPTS, LONG)
        await update(pair, sender_of(tiny_llama(3), kill_once), "3")
        assert other.engine.weight_version == "3"
        assert not other.engine.is_held
        models = {version: tiny_llama(int(version)).double() for version in "23"}
        check_answers(await asyncio.gather(*tasks), models, log_probs_of)
        await check_holds(other.engine, tiny_llama(3))
        await becomes(replica, "waiting")
        await update(pair, sender_of(tiny_llama(4)), "4")  # in which it takes part like the other
        for each in (replica, other):
            await check_holds(each.engine, tiny_llama(4))

    pair.run(scenario(), timeout_s=1000)
    assert "update to version 3: engine 0 (" in caplog.text
    assert "was lost during it; sending it again" in caplog.text
    # The other was paused for each try, and generated nothing between the two of version 3.
    asked = re.findall(
        r'"POST /(\w+)_generation HTTP', (pair.log / "server-1.log").read_text(errors="replace")
    )
    assert asked == ["pause", "continue"] * 2 + ["pause"] + ["pause", "continue"] * 2


def test_a_server_that_hangs_within_an_update_is_killed_and_the_other_takes_it_again(
    pair, tiny_llama, check_holds, living, caplog
):
    replica, other = pair.engine._replicas
    group, stops = group_of(other), [signal.SIGSTOP]

    def stop_once():
        if stops:
            os.killpg(group, stops.pop())

    async def scenario():
        await update(pair, sender_of(tiny_llama(5), stop_once), "5")
        await check_holds(replica.engine, tiny_llama(5))

    pair.run(scenario(), timeout_s=300)
    assert "was lost during it; sending it again" in caplog.text
    assert living(group) == []
