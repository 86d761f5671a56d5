"""Abort, pause, offload, close, and failures."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from slime_core.errors import CheckpointError, EngineError
from slime_core.protocols import SamplingParams
from slime_models.family.families.llama import LLAMA
from slime_torch.engine import TorchEngine
from slime_torch.section import TorchSection

LONG = SamplingParams(max_new_tokens=200, min_new_tokens=200, temperature=0)
PROMPTS = [[1, 2, 3], [4, 5], [6]]


@pytest.fixture
def scenario(tiny):
    """Return a function that runs `async (engine) -> result` on a serving engine, under a deadline."""

    def run(body, **options):
        async def main():
            async with asyncio.timeout(300), tiny("llama").serving(**options) as engine:
                return await body(engine)

        return asyncio.run(main())

    return run


async def until(condition) -> None:
    """Let the event loop turn until `condition()`."""
    while not condition():
        await asyncio.sleep(0)


def progress(engine, n):
    """Whether some running request has `n` tokens."""
    return lambda: any(len(request.tokens) >= n for request in engine._scheduler.running)


def begin(engine, prompts=PROMPTS, params=LONG):
    return [asyncio.create_task(engine.generate(prompt, params)) for prompt in prompts]


def test_abort_answers_with_what_there_is(scenario, tiny):
    async def body(engine):
        tasks = begin(engine)
        await until(progress(engine, 5))
        await engine.abort()
        return await asyncio.gather(*tasks)

    answers = scenario(body, max_running_requests=2)
    assert [answer.finish_reason for answer in answers] == ["abort"] * 3
    assert answers[2].tokens == []
    for prompt, answer in zip(PROMPTS[:2], answers, strict=False):
        assert 5 <= len(answer.tokens) == len(answer.log_probs) < 200
        wanted = tiny("llama").log_probs(prompt, answer.tokens)
        assert answer.log_probs == pytest.approx(wanted, abs=1e-5)


def test_abort_catches_requests_of_the_same_turn(scenario):
    async def body(engine):
        tasks = begin(engine)
        await asyncio.sleep(0)
        await engine.abort()
        return await asyncio.gather(*tasks)

    assert [answer.tokens for answer in scenario(body)] == [[]] * 3


def test_the_engine_serves_after_an_abort(scenario):
    async def body(engine):
        before = await engine.generate([9, 8], SamplingParams(max_new_tokens=8, temperature=0))
        tasks = begin(engine)
        await until(progress(engine, 3))
        await engine.abort()
        await asyncio.gather(*tasks)
        return before, await engine.generate([9, 8], SamplingParams(max_new_tokens=8, temperature=0))

    before, after = scenario(body)
    assert before.tokens == after.tokens


def test_pause_stops_progress_and_resume_goes_on(scenario):
    async def body(engine):
        undisturbed = await asyncio.gather(*begin(engine))
        tasks = begin(engine)
        await until(progress(engine, 4))
        await engine.pause()
        counts = [len(request.tokens) for request in engine._scheduler.running]
        for _ in range(50):
            await engine._worker.call(lambda: None)
        assert counts == [len(request.tokens) for request in engine._scheduler.running]
        await engine.resume()
        return undisturbed, await asyncio.gather(*tasks)

    undisturbed, paused = scenario(body)
    assert undisturbed == paused


def test_requests_in_flight_survive_offload_and_onload(scenario, tiny):
    async def body(engine):
        tasks = begin(engine)
        await until(progress(engine, 4))
        await engine.offload()
        assert engine._cache.nbytes == 0
        with pytest.raises(EngineError, match="offloaded"):
            await engine.generate([1], LONG)
        await engine.onload()
        return await asyncio.gather(*tasks)

    for prompt, answer in zip(PROMPTS, scenario(body), strict=True):
        assert len(answer.tokens) == 200
        assert answer.log_probs == pytest.approx(tiny("llama").log_probs(prompt, answer.tokens), abs=1e-5)


def test_a_cancelled_call_frees_its_slot(scenario):
    async def body(engine):
        tasks = begin(engine)
        await until(progress(engine, 2))
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        return [len(answer.tokens) for answer in answers[1:]]

    assert scenario(body, max_running_requests=2) == [200, 200]


class Broken:
    """A model of which nothing runs."""

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        raise ValueError("no such kernel")


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(scenario):
    async def body(engine):
        good = engine._scheduler._model
        engine._scheduler._model = Broken(good.device)
        answers = await asyncio.gather(*begin(engine), return_exceptions=True)
        engine._scheduler._model = good
        return answers, await engine.generate([1], SamplingParams(max_new_tokens=3, min_new_tokens=3))

    errors, answer = scenario(body)
    assert all(isinstance(error, EngineError) and "no such kernel" in str(error) for error in errors)
    assert len(answer.tokens) == 3


def test_each_request_of_a_failed_step_has_an_error_with_the_cause_and_the_log_has_one_traceback(
    scenario, caplog
):
    async def body(engine):
        engine._scheduler._model = Broken(engine.device)
        return await asyncio.gather(*begin(engine), return_exceptions=True)

    errors = scenario(body)
    assert len({id(error) for error in errors}) == 3
    assert [repr(error.__cause__) for error in errors] == ["ValueError('no such kernel')"] * 3
    (record,) = (one for one in caplog.records if one.name == "slime_torch.generation.worker")
    assert record.getMessage() == str(errors[0])
    assert 'raise ValueError("no such kernel")' in caplog.text


def test_what_finished_in_a_step_that_fails_later_is_answered(scenario):
    async def body(engine):
        good = engine._scheduler._model

        class BrokenDecode:
            def __getattr__(self, name):
                if name == "decode":
                    raise ValueError("no such kernel")
                return getattr(good, name)

        engine._scheduler._model = BrokenDecode()
        asked = [
            asyncio.create_task(engine.generate(prompt, replace(LONG, max_new_tokens=n, min_new_tokens=n)))
            for prompt, n in zip(PROMPTS, (1, 5, 1), strict=True)
        ]
        async with asyncio.timeout(60):
            return await asyncio.gather(*asked, return_exceptions=True)

    first, failed, last = scenario(body)
    assert [len(one.tokens) for one in (first, last)] == [1, 1]
    assert isinstance(failed, EngineError)
    assert "no such kernel" in str(failed)


def test_close_fails_what_is_in_flight_and_may_be_called_twice(scenario):
    async def body(engine):
        tasks = begin(engine)
        await until(progress(engine, 2))
        await engine.close()
        await engine.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all("closed" in str(error) for error in scenario(body))


def test_an_engine_that_was_never_started_says_so(tiny):
    engine = tiny("llama").engine()
    with pytest.raises(EngineError, match="not started"):
        asyncio.run(engine.generate([1], LONG))
    asyncio.run(engine.close())


def test_an_engine_whose_start_failed_leaves_no_thread(tiny, tokenizer, tmp_path):
    shutil.copy(tiny("llama").folder / "config.json", tmp_path)
    engine = TorchEngine(tmp_path, LLAMA, tokenizer, dtype=torch.float32, section=TorchSection())
    before = threading.enumerate()

    async def main():
        with pytest.raises(CheckpointError, match=r"found neither model\.safetensors"):
            await engine.start()
        await engine.close()

    asyncio.run(main())
    started = [each for each in threading.enumerate() if each not in before and each.name == "slime-torch"]
    for each in started:
        each.join(timeout=10)
    assert not any(each.is_alive() for each in started)


def test_its_load_is_the_slots_and_the_pages_that_are_taken(scenario):
    """Two slots of 100 tokens, 4 pages, each: requests of 3 and 2 ids that have some tokens, and one that waits."""

    async def body(engine):
        idle = await engine.current_load()
        tasks = begin(engine, params=replace(LONG, max_new_tokens=90, min_new_tokens=90))
        await until(progress(engine, 5))
        await engine.pause()
        lengths = [request.length for request in engine._scheduler.running]
        busy = await engine.current_load()
        await engine.resume()
        await asyncio.gather(*tasks)
        await engine.offload()
        return idle, lengths, busy, await engine.current_load()

    idle, lengths, busy, offloaded = scenario(body, max_running_requests=2, max_context_len=100)
    assert (idle.kv_cache_usage, idle.running, idle.queued) == (0, 0, 0)
    assert (busy.running, busy.queued, busy.retractions) == (2, 1, 0)
    assert len(lengths) == 2
    in_pages = [-(-(length - 1) // 32) for length in lengths]  # the newest token is not there yet
    assert busy.kv_cache_usage == pytest.approx(sum(in_pages) / 8)
    assert offloaded == idle


def test_a_closed_engine_has_no_load(scenario):
    async def body(engine):
        await engine.close()
        with pytest.raises(EngineError, match="is closed"):
            await engine.current_load()

    scenario(body)
