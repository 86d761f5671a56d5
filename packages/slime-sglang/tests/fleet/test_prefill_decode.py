"""A real prefill engine and a real decode engine: what they answer, updated, killed and stopped at work.

The tests share the servers, and run in their order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from slime_core.protocols import SamplingParams
from slime_core.weights.sync import sync_weights

from ..fake_fleet import begun, tokens_so_far, until
from ..sender import Sender
from .greedy import GREEDY, LONG, assert_generates

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

PROMPTS = [[5, 6, number] for number in range(6)]
#: Read in five pieces of 64 tokens.
LONG_PROMPT = [1 + number * 37 % 126 for number in range(300)]
#: Minutes of work for the cores, ended by whoever asks for it.
ENDLESS = SamplingParams(max_new_tokens=5000, min_new_tokens=5000, temperature=0)
INTERVAL_S, DEADLINE_S = 3, 30


def sender_of(model, kind=Sender):
    return kind({name: parameter.detach() for name, parameter in model.named_parameters()})


@pytest.fixture(scope="module")
def pair(served_by_flags, model_path, tmp_path_factory):
    """A started fleet: a prefill engine and a decode engine."""
    folder = tmp_path_factory.mktemp("sglang-apart")
    flags = {
        "rollout-num-gpus": 2,
        "prefill-num-servers": 1,
        "rollout-health-check-interval": INTERVAL_S,
        "rollout-health-check-timeout": DEADLINE_S,
        "rollout-engine-restarts": 1,
        "sglang-max-total-tokens": 65536,
        "sglang-max-running-requests": 8,
        "sglang-chunked-prefill-size": 64,
        "sglang-stream-interval": 8,
    }
    yield from served_by_flags(model_path, folder, flags, "--use-fault-tolerance")


@pytest.fixture
def check_holds(pair, log_probs_of):
    """Checks that the engines generate what a model does."""

    prompts = (*PROMPTS[:2], LONG_PROMPT)
    return lambda model: pair.run(assert_generates(pair.engine, model, log_probs_of, prompts))


def update(pair, model, version, transport="memory"):
    pair.run(sync_weights(sender_of(model), pair.engine, version=version, timeout_s=240, transport=transport))


@pytest.fixture
def assert_greedy(log_probs_of, shortfalls_of):
    """Checks that each token of an answer is the likeliest of the model of its version, with its log-prob.

    Beyond 200 tokens float32 is further off than 1e-5, and may take one token for another that is as likely.
    """

    def check(prompt, answer, models):
        is_long = len(answer.tokens) > 200
        for span in answer.metadata["weight_versions"]:
            model, place = models[span["version"]], slice(span["start"], span["end"])
            log_probs, _ = log_probs_of(model, prompt, answer.tokens, can_end=False)
            assert max(shortfalls_of(model, prompt, answer.tokens)[place]) < (1e-4 if is_long else 1e-6)
            assert answer.log_probs[place] == pytest.approx(
                log_probs[place], abs=1e-4 if is_long else 1e-5, rel=0
            )
        assert span["end"] == len(answer.tokens) == len(answer.log_probs)

    return check


def group_of(replica):
    return replica.engine._server._process.pid


async def back(replica):
    while replica.state != "serving":
        await asyncio.sleep(0.2)


def test_a_prefilled_prompt_is_decoded_as_transformers_does(pair, model, check_holds, log_probs_of):
    check_holds(model)
    one = SamplingParams(max_new_tokens=1, temperature=0)
    answer = pair.run(pair.engine.generate([9], one))  # the token that comes with the cache
    log_probs, likeliest = log_probs_of(model, [9], answer.tokens)
    assert (answer.tokens, answer.finish_reason) == (likeliest, "length")
    assert answer.log_probs == pytest.approx(log_probs, abs=1e-5, rel=0)
    stop = SamplingParams(max_new_tokens=12, temperature=0, stop_token_ids=tuple(answer.tokens))
    ended = pair.run(pair.engine.generate([9], stop))
    assert (ended.tokens, ended.finish_reason) == (answer.tokens, "stop")


def test_updates_reach_both_and_requests_in_flight_go_on_with_the_new_weights(
    pair, tiny_llama, check_holds, assert_greedy
):
    update(pair, tiny_llama(1), "1")
    check_holds(tiny_llama(1))

    class LateSender(Sender):
        """Has requests in flight by the time that all but the end is sent."""

        async def _buckets(self):
            async for bucket in super()._buckets():
                yield bucket
            self.tasks = await begun(pair.engine, PROMPTS, ENDLESS)

    async def scenario():
        sender = sender_of(tiny_llama(2), kind=LateSender)
        await sync_weights(sender, pair.engine, version="2", timeout_s=240, transport="distributed")
        n_tokens = [len(tokens_so_far(task)) for task in sender.tasks]
        await until(
            lambda: all(len(tokens_so_far(t)) > n for t, n in zip(sender.tasks, n_tokens, strict=True))
        )
        await pair.engine.abort()
        return await asyncio.gather(*sender.tasks)

    answers = pair.run(scenario())
    models = {"1": tiny_llama(1).double(), "2": tiny_llama(2).double()}
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_greedy(prompt, answer, models)
        versions = [span["version"] for span in answer.metadata["weight_versions"]]
        assert versions == ["1", "2"]  # what arrived before is kept
    check_holds(tiny_llama(2))


def test_an_abort_ends_what_prefills_what_decodes_and_what_waits(pair, tiny_llama, check_holds):
    async def scenario():
        tasks = await begun(pair.engine, PROMPTS, ENDLESS)
        more = [asyncio.create_task(pair.engine.generate([*LONG_PROMPT, n], ENDLESS)) for n in range(6)]
        _, writer = pair.engine._replicas
        await until(lambda: writer.pending == len(tasks) + len(more))
        await pair.engine.abort()
        return await asyncio.gather(*tasks), await asyncio.gather(*more)

    begun_ones, others = pair.run(scenario())
    assert {answer.finish_reason for answer in begun_ones + others} == {"abort"}
    assert all(0 < len(answer.tokens) < ENDLESS.max_new_tokens for answer in begun_ones)
    assert all(replica.pending == 0 for replica in pair.engine._replicas)
    check_holds(tiny_llama(2))


def test_both_release_their_memory_and_take_it_back(pair, tiny_llama, check_holds):
    pair.run(pair.engine.offload())
    pair.run(pair.engine.onload())
    update(pair, tiny_llama(2), "2 again", "disk-delta")
    check_holds(tiny_llama(2))


def test_one_that_generates_is_killed_and_no_token_is_lost(pair, tiny_llama, check_holds, assert_greedy):
    _, replica = pair.engine._replicas
    group = group_of(replica)

    async def scenario():
        tasks = await begun(pair.engine, PROMPTS, LONG)
        os.killpg(group, signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        await back(replica)
        return answers

    for prompt, answer in zip(PROMPTS, pair.run(scenario(), timeout_s=1000), strict=True):
        assert_greedy(prompt, answer, {"2 again": tiny_llama(2).double()})
        assert len(answer.tokens) == LONG.max_new_tokens
    assert group_of(replica) != group
    check_holds(tiny_llama(2))


def test_one_that_reads_hangs_and_is_replaced_while_the_other_goes_on(
    pair, tiny_llama, check_holds, living, assert_greedy
):
    replica, writer = pair.engine._replicas
    group, kept = group_of(replica), group_of(writer)

    async def scenario():
        tasks = await begun(pair.engine, PROMPTS, LONG)
        os.killpg(group, signal.SIGSTOP)
        begin = time.monotonic()
        late = asyncio.create_task(pair.engine.generate(LONG_PROMPT, GREEDY))
        while replica.state == "serving":
            await asyncio.sleep(0.1)
        seconds, answers = time.monotonic() - begin, await asyncio.gather(*tasks)
        await late
        return seconds, answers

    seconds, answers = pair.run(scenario(), timeout_s=1000)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_greedy(prompt, answer, {"2 again": tiny_llama(2).double()})
        assert len(answer.tokens) == LONG.max_new_tokens
    assert seconds < 4 * (INTERVAL_S + DEADLINE_S)  # without checks: the request's deadline, an hour
    assert living(group) == []  # a stopped process holds its memory
    assert group_of(writer) == kept
    update(pair, tiny_llama(3), "3", "disk")
    check_holds(tiny_llama(3))
