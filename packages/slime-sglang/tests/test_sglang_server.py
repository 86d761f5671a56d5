"""What the server itself does on a machine without a GPU, and whether it still needs our patches."""

from __future__ import annotations

import pytest
from slime_core.protocols import SamplingParams
from slime_sglang.compat import PATCHES
from slime_sglang.engine import SglangEngine
from slime_sglang.section import SglangSection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def test_server_survives_release_and_resume_of_memory(serving):
    async def scenario():
        before = await serving.engine.generate([5, 6, 7, 8], GREEDY)
        await serving.engine.offload()
        await serving.engine.onload()
        return before, await serving.engine.generate([5, 6, 7, 8], GREEDY)

    before, after = serving.run(scenario())
    assert after.tokens == before.tokens


def test_a_server_that_runs_already_is_joined_and_left_running(serving, model_path, tmp_path):
    joined = SglangEngine(
        model_path,
        dtype="float32",
        section=SglangSection(staging_dir=tmp_path),
        folder=tmp_path,
        address=serving.engine.url.removeprefix("http://"),
    )

    async def scenario():
        try:
            await joined.start()
            return await joined.generate([5, 6, 7, 8], GREEDY)
        finally:
            await joined.close()

    answer = serving.run(scenario())
    assert answer.tokens == serving.run(serving.engine.generate([5, 6, 7, 8], GREEDY)).tokens


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
