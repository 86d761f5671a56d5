"""What an engine asks of its server, one that says that it is SGLang's."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from slime_core.errors import DeadlineError
from slime_core.protocols import SamplingParams
from slime_sglang.engine import SglangEngine
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings
from slime_sglang.weights.protocol import NONE_SENT

from .fake_worker import KEY, FakeWorker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def settings(model_path, tmp_path):
    """Of an engine whose server is to be named."""
    section = SglangSection(staging_dir=tmp_path)
    return ServerSettings(
        model_path=model_path, dtype="float32", section=section, folder=tmp_path, key=KEY, keeps_cache=True
    )


@asynccontextmanager
async def joined(settings, worker):
    """Yield an engine that has joined a worker."""
    engine = SglangEngine(replace(settings, address=worker.address))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def asked(settings, scenario):
    """Return what a scenario makes of a worker and an engine that has joined it."""

    async def run():
        worker = FakeWorker(settings.model_path)
        await worker.start()
        try:
            async with joined(settings, worker) as engine:
                return await scenario(worker, engine)
        finally:
            await worker.close()

    return asyncio.run(run())


def test_caches_that_are_kept_are_named_by_the_weights_and_by_the_run(settings):
    """An external server has what runs before computed, by weights of the same versions."""

    async def scenario(worker, engine):
        async with joined(settings, worker) as other:
            for each, version in ((engine, "1"), (engine, "1"), (engine, "2"), (other, "1")):
                await each.loaded(version)
                await each.generate([1, 2], SamplingParams(max_new_tokens=3))
        return [body["extra_key"] for body in worker.bodies]

    first, same, newer, others = asked(settings, scenario)
    assert first == same
    assert len({first, newer, others}) == 3


def test_weights_whose_memory_was_given_up_are_of_no_version(settings):
    """Else the update that brings the same weights again would leave the server out."""

    async def scenario(worker, engine):
        await engine.loaded("1")
        await engine.offload()
        await engine.onload()
        return engine.weight_version

    assert asked(settings, scenario) == NONE_SENT


@pytest.mark.parametrize("is_paused", [True, False])
def test_an_update_does_not_end_a_pause(settings, is_paused):
    async def scenario(worker, engine):
        if is_paused:
            await engine.pause()
        worker.asked.clear()
        async with engine.paused():
            pass
        goes_on = "/continue_generation" in worker.asked
        if is_paused:
            await engine.resume()
        return goes_on, worker.asked.count("/continue_generation")

    assert asked(settings, scenario) == (not is_paused, 1)


def test_a_server_that_hangs_at_the_start_is_told_with_the_call_and_its_deadline(settings):
    section = settings.section.model_copy(update={"control_timeout_s": 0.3})

    async def run():
        worker = FakeWorker(settings.model_path)
        worker.faults["/server_info"] = "hang"
        await worker.start()
        try:
            with pytest.raises(DeadlineError, match=r"/server_info.* 0\.3 s"):
                async with joined(replace(settings, section=section), worker):
                    pass
        finally:
            await worker.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "flag", "call"),
    [
        (
            "/generate",
            "--sglang-request-timeout-s",
            lambda engine: engine.generate([1, 2], SamplingParams(max_new_tokens=3)),
        ),
        ("/pause_generation", "--sglang-control-timeout-s", lambda engine: engine.pause()),
        ("/model_info", "--sglang-control-timeout-s", lambda engine: engine.model_info()),
        (
            "/health_generate",
            "--rollout-health-check-timeout",
            lambda engine: engine.probe(timeout_s=0.3),
        ),
    ],
    ids=["generation", "control", "question", "health"],
)
def test_a_call_that_misses_its_deadline_names_the_flag_that_sets_it(settings, path, flag, call):
    async def scenario(worker, engine):
        engine.control_timeout_s = 0.3
        worker.faults[path] = "hang"
        with pytest.raises(DeadlineError) as missed:
            await call(engine)
        return str(missed.value).removeprefix(engine.url)

    section = settings.section.model_copy(update={"request_timeout_s": 0.3})
    assert asked(replace(settings, section=section), scenario) == f"{path}: no answer after 0.3 s ({flag})"
