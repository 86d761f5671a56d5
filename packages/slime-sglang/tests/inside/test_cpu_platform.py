"""What the server itself does on a machine without a GPU, and whether it still needs our patches."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import aiohttp
import pytest
from slime_core.protocols import SamplingParams
from slime_sglang.engine import SglangEngine
from slime_sglang.inside.compat import PATCHES, WORKER_PATCHES
from slime_sglang.settings.section import SglangSection
from slime_sglang.settings.server import ServerSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def test_server_survives_release_and_resume_of_memory(serving):
    async def scenario():
        before = await serving.engine.generate([5, 6, 7, 8], GREEDY)
        await serving.engine.offload()
        await serving.engine.onload()
        return before, await serving.engine.generate([5, 6, 7, 8], GREEDY)

    before, after = serving.run(scenario())
    assert after.tokens == before.tokens


def test_shared_memory_has_the_name_of_what_goes_with_the_server(serving, shared_memory_of):
    name, files = shared_memory_of(serving.log)
    (file,) = files
    assert file.startswith(f"sglang_loads_{name}_")


def test_a_server_that_runs_already_is_joined_and_left_running(serving, model_path, tmp_path):
    joined = SglangEngine(
        ServerSettings(
            model_path=model_path,
            dtype="float32",
            section=SglangSection(staging_dir=tmp_path),
            folder=tmp_path,
            address=serving.engine.url.removeprefix("http://"),
            key=serving.engine.key,
        )
    )

    async def scenario():
        try:
            await joined.start()
            return await joined.generate([5, 6, 7, 8], GREEDY)
        finally:
            await joined.close()

    answer = serving.run(scenario())
    assert answer.tokens == serving.run(serving.engine.generate([5, 6, 7, 8], GREEDY)).tokens


#: What anybody may ask: whether the server lives, and Prometheus for its metrics, which is no route of SGLang's list.
OPEN = {"/health", "/health_generate", "/ready"}
#: What changes the server, by the names that slime and SGLang's own clients call.
CONTROL = {
    "/abort_request", "/begin_weight_update", "/continue_generation", "/end_weight_update", "/flush_cache", "/generate",
    "/init_weights_update_group", "/load_lora_adapter", "/pause_generation", "/release_memory_occupation",
    "/resume_memory_occupation", "/server_info", "/set_internal_state", "/update_weight_version",
    "/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_ipc",
    "/update_weights_from_tensor", "/weights_checker",
}  # fmt: skip


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer nonsense", "the key itself", "Basic the key itself"]
)
def test_every_way_into_the_server_asks_for_the_key(serving, header):
    """All of its routes by all of their methods, as the server lists them."""
    key = serving.engine.key
    sent = {} if header is None else {"Authorization": header.replace("the key itself", key)}

    async def scenario():
        routes = await serving.engine._client.get("/openapi.json", timeout_s=60)
        async with aiohttp.ClientSession(serving.engine.url) as session:
            answered = set()
            for path, methods in routes["paths"].items():
                for method in methods:
                    body = None if method == "get" else {}
                    async with session.request(method, path, json=body, headers=sent) as reply:
                        answered |= set() if reply.status == 401 else {path}
        return set(routes["paths"]), answered

    routes, answered = serving.run(scenario())
    assert routes >= CONTROL
    assert answered <= OPEN


def commands():
    """The command lines of all processes that anybody can read."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield path.read_bytes()


def test_nobody_can_read_the_key(serving):
    key = serving.engine.key.encode()
    assert any(b"slime_sglang.server.launch" in command for command in commands())
    assert not [command for command in commands() if key in command]
    assert [
        path for path in serving.log.parent.rglob("*") if path.is_file() and key in path.read_bytes()
    ] == []
    assert "'api_key': '***'" in serving.log.read_text(errors="replace")


def test_weights_are_compared_on_the_cpu(serving):
    serving.post("/weights_checker", {"action": "snapshot"})
    assert serving.post("/weights_checker", {"action": "compare"})["success"]


def test_every_patch_is_still_needed(serving):
    """Fails when SGLang no longer makes the call, or when PyTorch without a GPU no longer refuses it."""
    serving.post("/release_memory_occupation", {})
    serving.post("/resume_memory_occupation", {})
    serving.post("/weights_checker", {"action": "snapshot"})
    serving.post("/weights_checker", {"action": "compare"})
    log = serving.log.read_text(errors="replace")
    unused = [patch.name for patch in PATCHES if patch.log_line not in log]
    assert unused == ["torch.cuda.cudart"]  # for models with experts: test_sglang_experts.py


def cpu_s(name):
    """CPU time of the scheduler of a server whose scratch folder has this name, seconds."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (process / "cmdline").read_bytes().startswith(b"sglang::scheduler"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if name.encode() in Path("/proc", fields[1], "environ").read_bytes():
                    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise LookupError(name)


def test_a_paused_scheduler_sleeps(serving, shared_memory_of):
    (patch,) = [patch for patch in WORKER_PATCHES if "paused" in patch.name]
    name, _ = shared_memory_of(serving.log)
    serving.post("/pause_generation", {"mode": "retract"})
    before = cpu_s(name)
    time.sleep(3)
    used = cpu_s(name) - before
    serving.post("/continue_generation", {})
    assert used < 1.5  # 0.1 on an idle machine; without the patch it is all of the time that it gets
    assert patch.log_line in serving.log.read_text(errors="replace")
