"""The engine over a real server: what it generates, against transformers, and how it refuses, ends and fails."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time

import pytest
from slime_core.errors import EngineError
from slime_core.protocols import SamplingParams
from slime_models.hf.tokenizer import load_tokenizer
from slime_sglang.generation.response import PartialResponse
from slime_sglang.http.client import ServerFaultError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPTS = [[5, 6, 7, 8], [9], [100, 3, 77, 12, 64, 31, 2]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
LONG = SamplingParams(max_new_tokens=240, min_new_tokens=240, temperature=0)
TOO_LONG = [5] * 20000


def test_greedy_tokens_and_log_probs_are_those_of_transformers(serving, model, log_probs_of):
    async def scenario():
        return await asyncio.gather(*(serving.engine.generate(prompt, GREEDY) for prompt in PROMPTS))

    for prompt, answer in zip(PROMPTS, serving.run(scenario()), strict=True):
        log_probs, likeliest = log_probs_of(model, prompt, answer.tokens)
        assert (answer.tokens, answer.finish_reason) == (likeliest, "length")
        assert answer.log_probs == pytest.approx(log_probs, abs=1e-5, rel=0)


def test_log_probs_of_sampled_tokens_are_at_the_temperature(serving, model, log_probs_of):
    params = SamplingParams(max_new_tokens=20, temperature=0.7)
    answer = serving.run(serving.engine.generate(PROMPTS[0], params))
    log_probs, _ = log_probs_of(model, PROMPTS[0], answer.tokens, temperature=0.7)
    assert answer.log_probs == pytest.approx(log_probs, abs=1e-5, rel=0)


def test_a_stop_token_ends_the_response_and_stays_in_it(serving):
    whole = serving.run(serving.engine.generate(PROMPTS[0], GREEDY))
    third = whole.tokens[2]
    params = SamplingParams(max_new_tokens=12, temperature=0, stop_token_ids=(third,))
    answer = serving.run(serving.engine.generate(PROMPTS[0], params))
    assert (answer.tokens, answer.finish_reason) == (
        whole.tokens[: whole.tokens.index(third) + 1],
        "stop",
    )


def test_a_stop_string_ends_the_response_and_its_tokens_stay_in_it(serving):
    whole = serving.run(serving.engine.generate(PROMPTS[0], GREEDY))
    third = whole.tokens[2]
    params = SamplingParams(max_new_tokens=12, temperature=0, stop=(f"t{third}",))
    answer = serving.run(serving.engine.generate(PROMPTS[0], params))
    assert answer.finish_reason == "stop"
    assert answer.tokens == whole.tokens[: len(answer.tokens)]
    assert f"t{third}" in f"t{answer.tokens[-1]}"


class CutError(ServerFaultError):
    """The client has enough of a stream."""


async def streamed(engine, response, *, events=1000):
    """Fill a response by a stream, of which so many events are taken; return them."""
    taken = []

    def take(event):
        if len(taken) == events:
            raise CutError
        response.take(event)
        taken.append(event)

    with contextlib.suppress(CutError):
        await engine._client.stream("/generate", response.request(stream=True), take, timeout_s=60)
    return taken


def test_a_stream_brings_each_token_once_and_is_the_plain_answer(serving):
    response = PartialResponse(PROMPTS[0], GREEDY)
    events = serving.run(streamed(serving.engine, response))
    answer, plain = response.completion("none"), serving.run(serving.engine.generate(PROMPTS[0], GREEDY))
    assert len(events) > 1
    assert [token for event in events for token in event["output_ids"]] == plain.tokens
    assert (answer.tokens, answer.finish_reason) == (plain.tokens, plain.finish_reason)
    assert answer.log_probs == pytest.approx(plain.log_probs, abs=1e-6, rel=0)
    assert answer.metadata["weight_versions"] == plain.metadata["weight_versions"]


def test_what_goes_on_from_a_stream_that_was_cut_is_the_unbroken_response(
    serving, model, model_path, log_probs_of
):
    async def scenario():
        response = PartialResponse(PROMPTS[0], LONG, tokenizer=load_tokenizer(model_path))
        for events in (3, 1, 8):
            await streamed(serving.engine, response, events=events)
        await serving.engine.extend(response, stream=True)
        return response.completion("none")

    answer = serving.run(scenario())
    log_probs, likeliest = log_probs_of(model, PROMPTS[0], answer.tokens, can_end=False)
    assert (len(answer.tokens), answer.tokens) == (LONG.max_new_tokens, likeliest)
    assert answer.log_probs == pytest.approx(log_probs, abs=1e-5, rel=0)


def test_a_stop_string_that_two_requests_share_ends_the_response(serving, model_path):
    whole = serving.run(serving.engine.generate(PROMPTS[0], GREEDY))
    tokenizer = load_tokenizer(model_path)
    params = dataclasses.replace(GREEDY, stop=(tokenizer.decode(whole.tokens[4:6]),))
    unbroken = serving.run(serving.engine.generate(PROMPTS[0], params))
    response = PartialResponse(PROMPTS[0], params, tokenizer=tokenizer)
    response.request(stream=True)
    drawn = [[log_prob, token, None] for log_prob, token in zip(whole.log_probs, whole.tokens, strict=True)]
    meta = {"finish_reason": None, "weight_version": "0", "completion_tokens": 5}
    response.take({"output_ids": whole.tokens[:5], "meta_info": meta | {"output_token_logprobs": drawn[:5]}})
    serving.run(serving.engine.extend(response, stream=True))
    answer = response.completion("none")
    assert (answer.tokens, answer.finish_reason) == (unbroken.tokens, unbroken.finish_reason)
    assert (len(answer.tokens), answer.finish_reason) == (6, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_abort_answers_with_what_there_is_and_to_those_who_wait_here(serving, running, endless, stream):
    """The server has room for four requests, and so has the engine."""

    async def scenario():
        responses = [PartialResponse([i, 5], endless) for i in range(6)]
        requests = [serving.engine.extend(response, stream=stream) for response in responses]
        tasks = [asyncio.ensure_future(request) for request in requests[:3]]
        await running(serving.engine, 3)
        tasks += [asyncio.ensure_future(request) for request in requests[3:]]
        while serving.engine.pending < len(requests):
            await asyncio.sleep(0)
        await serving.engine.abort()
        await asyncio.gather(*tasks)
        return [response.completion("none") for response in responses]

    answers = serving.run(scenario())
    assert [answer.finish_reason for answer in answers] == ["abort"] * 6
    assert all(0 < len(answer.tokens) < endless.max_new_tokens for answer in answers[:3])
    assert [answer.tokens for answer in answers[4:]] == [[], []]


async def quiet(response):
    """Return how many tokens a response has, once no more come."""
    n_tokens = -1
    while n_tokens != (n_tokens := len(response.completion("none").tokens)):
        await asyncio.sleep(0.5)
    return n_tokens


def test_a_paused_request_goes_on_where_it_was(serving, model, in_flight, endless, log_probs_of):
    async def scenario():
        response = PartialResponse(PROMPTS[0], endless)
        task = asyncio.ensure_future(serving.engine.extend(response, stream=True))
        await in_flight(response)
        await serving.engine.pause()
        n_tokens = await quiet(response)  # of a request that is not paused tokens come for minutes
        await serving.engine.resume()
        await in_flight(response, n_tokens + 50)
        await serving.engine.abort()
        await task
        return n_tokens, response.completion("none").tokens

    n_tokens, tokens = serving.run(scenario())
    assert 0 < n_tokens < n_tokens + 50 <= len(tokens)
    _, likeliest = log_probs_of(model, PROMPTS[0], tokens[: n_tokens + 50], can_end=False)
    assert tokens[: n_tokens + 50] == likeliest


def test_memory_is_released_once_nothing_is_generated_any_more(serving, in_flight):
    """SGLang exits when told to release its memory while a batch runs."""

    async def scenario():
        engine, response = serving.engine, PartialResponse([5, 6], LONG)
        task = asyncio.ensure_future(engine.extend(response, stream=True))
        check = asyncio.ensure_future(engine.probe(timeout_s=60))
        await in_flight(response)
        await engine.offload()
        await asyncio.gather(task, check)  # without the memory nothing would be generated that was left
        await engine.onload()
        return response.completion("none"), await engine.generate([5, 6], LONG)

    during, after = serving.run(scenario())
    assert during.tokens == after.tokens


def test_a_request_that_the_server_refuses_is_an_error_at_once(serving):
    refused = '"POST /generate HTTP/1.1" 400'
    before = serving.log.read_text().count(refused)
    with pytest.raises(EngineError, match=r"/generate.*(longer|exceed|length)"):
        serving.run(serving.engine.generate(TOO_LONG, GREEDY))
    while serving.log.read_text().count(refused) == before:  # a server logs after it has answered
        serving.run(asyncio.sleep(0.05))
    assert serving.log.read_text().count(refused) - before == 1  # it would be refused again


def test_a_refusal_within_a_stream_is_an_error_and_no_fault_of_the_server(serving):
    with pytest.raises(EngineError, match=r"/generate.*(longer|exceed|length)") as caught:
        serving.run(serving.engine.extend(PartialResponse(TOO_LONG, GREEDY), stream=True))
    assert not isinstance(caught.value, ServerFaultError)


@pytest.mark.faults
def test_a_model_that_cannot_be_served_ends_the_start_with_the_log(new_engine, model_path, tmp_path):
    engine = new_engine(model_path, tmp_path, server_args={"attention_backend": "no-such-backend"})
    with pytest.raises(EngineError, match=r"(?s)ended with status.*server\.log.*no-such-backend"):
        asyncio.run(engine.start())


@pytest.mark.faults
def test_a_killed_server_is_noticed_at_once_and_leaves_nobody_behind(
    new_engine, in_flight, endless, living, model_path, tmp_path
):
    async def scenario():
        engine = new_engine(model_path, tmp_path)
        await engine.start()
        try:
            group = engine._server._process.pid
            response = PartialResponse([5, 6], endless)
            task = asyncio.ensure_future(engine.extend(response, stream=True))
            await in_flight(response)
            os.kill(group, signal.SIGKILL)
            begin = time.monotonic()
            with pytest.raises(EngineError, match=r"server ended with status -9.*server\.log"):
                await task
            noticed = time.monotonic() - begin
            with pytest.raises(EngineError, match="ended with status -9"):
                await engine.generate([5, 6], LONG)
        finally:
            await engine.close()
        return noticed, group

    noticed, group = asyncio.run(scenario())
    assert noticed < 60  # unnoticed it would be the request's deadline, an hour
    assert living(group) == []
