"""Servers that run already: which are joined, which are refused by name, and that none is stopped."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
from slime_core.errors import EngineError
from slime_core.protocols import SamplingParams
from slime_core.runtime.processes.ports import ReservedPort
from slime_sglang.engine import SglangEngine
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings

from ..fake_worker import KEY, FakeWorker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def join(model_path, tmp_path):
    """Join a server that says the given things of itself; returns how it was used."""

    def run(
        served=None,
        returns_routed_experts=False,
        version="default",
        is_updated=True,
        key=KEY,
        releases_memory=False,
        **info,
    ):
        async def scenario():
            worker = FakeWorker(served or model_path, **info)
            worker.version = version
            await worker.start()
            section = SglangSection(staging_dir=tmp_path)
            engine = SglangEngine(
                ServerSettings(
                    model_path=model_path,
                    dtype="float32",
                    section=section,
                    folder=tmp_path,
                    address=worker.address,
                    key=key,
                    returns_routed_experts=returns_routed_experts,
                    is_updated=is_updated,
                    releases_memory=releases_memory,
                )
            )
            try:
                await engine.start()
                await engine.generate([1, 2], SamplingParams(max_new_tokens=3))
                await engine.close()
                with pytest.raises(EngineError, match="not used any more"):
                    await engine.generate([1, 2], SamplingParams(max_new_tokens=3))
                return worker.answered
            finally:
                await engine.close()
                await worker.close()

        return asyncio.run(scenario())

    return run


def test_a_server_is_joined_and_left_running(join):
    assert join() == [[1, 2]]


def test_how_many_ranks_it_has_is_read_from_the_server(join):
    assert join(tp_size=2) == [[1, 2]]


def test_a_copy_of_the_model_elsewhere_is_the_same_model(join, model_path, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(model_path / "config.json", copy)
    assert join(served=copy) == [[1, 2]]


def test_where_no_weights_are_sent_a_server_must_have_those_of_the_folder(join, model_path, tmp_path):
    assert join(is_updated=False) == [[1, 2]]
    with pytest.raises(EngineError, match=r"found weights of version '3', .*; start it anew"):
        join(is_updated=False, version="3")
    (tmp_path / "tuned").mkdir()
    shutil.copy(model_path / "config.json", tmp_path / "tuned")
    with pytest.raises(
        EngineError, match=rf"same shapes in {tmp_path}/tuned; wanted the weights of {model_path}"
    ):
        join(is_updated=False, served=tmp_path / "tuned")


def test_a_server_that_does_not_say_where_tokens_went_is_refused_where_that_is_needed(join):
    with pytest.raises(EngineError, match="start it with --enable-return-routed-experts"):
        join(returns_routed_experts=True)


def test_a_server_that_keeps_its_memory_is_refused_where_the_trainer_wants_it(join):
    assert join(releases_memory=True, device="cpu") == [[1, 2]]
    assert join(releases_memory=True, device="cuda", enable_memory_saver=True) == [[1, 2]]
    with pytest.raises(EngineError, match=r"start it with --enable-memory-saver, or run without --offload"):
        join(releases_memory=True, device="cuda", enable_memory_saver=False)


def test_a_server_that_may_answer_by_earlier_weights_is_refused_where_they_are_updated(join):
    with pytest.raises(EngineError, match=r"hicache_storage_backend: found file; wanted no such argument"):
        join(hicache_storage_backend="file")
    assert join(hicache_storage_backend="file", is_updated=False) == [[1, 2]]


def test_another_model_is_refused_by_name(join, model_path, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((model_path / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with pytest.raises(EngineError, match=rf"127\.0\.0\.1:\d+: found the model {other}; wanted {model_path}"):
        join(served=other)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"dtype": "bfloat16"}, "found dtype bfloat16; wanted float32"),
        (
            {"custom_weight_loader": None},
            r"start it with --custom-weight-loader slime_sglang\.inside\.loader\.check",
        ),
        ({"dp_size": 2}, "'dp_size': 2"),
        (
            {"pp_size": 2, "returns_routed_experts": True, "enable_return_routed_experts": True},
            "2 pipeline stages, each of which says which experts tokens passed in its own layers alone",
        ),
    ],
)
def test_a_server_whose_weights_could_not_be_proven_is_refused(join, said, message):
    with pytest.raises(EngineError, match=message):
        join(**said)


@pytest.mark.parametrize(
    ("key", "found"), [(None, "it was sent no key"), ("another", "the key that it was sent is not its own")]
)
def test_a_server_that_asks_for_another_key_is_refused_by_the_flag_that_names_it(join, key, found):
    with pytest.raises(EngineError, match=rf"model_info: status 401: {found}; .*--rollout-external-key-file"):
        join(key=key)


def test_an_address_where_nobody_answers_is_refused_at_once(model_path, tmp_path):
    port = ReservedPort()
    engine = SglangEngine(
        ServerSettings(
            model_path=model_path,
            dtype="float32",
            section=SglangSection(request_retries=0),
            folder=tmp_path,
            address=f"127.0.0.1:{port.number}",
        )
    )
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:\d+: nobody answers .*; start it first"):
        asyncio.run(engine.start())
    port.release()
