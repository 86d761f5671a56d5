"""The agent program for environments of verifiers v1, which uv installs into an environment of their own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
from aiohttp import web
from slime_agents.environments import verifiers_program

HERE = Path(__file__).parent
#: `[env]` of verifiers: the taskset beside this file, its agent a plain chat on this machine.
ENV = {
    "taskset": {"id": "sums_taskset"},
    "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}},
}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with verifiers 0.4.0."""
    place = tmp_path_factory.mktemp("verifiers") / "venv"
    subprocess.run(["uv", "venv", "-q", "--python", "3.12", str(place)], check=True, cwd=HERE, timeout=120)
    found = place / "bin" / "python"
    install = ["uv", "pip", "install", "-q", "--python", str(found), "verifiers==0.4.0"]
    subprocess.run(install, check=True, cwd=HERE, timeout=400)
    return found


async def played(python, *tasks):
    """Return what the program posts for each task, and how it ends; the policy says `It is 5.` whatever it is asked."""
    told = []

    async def chat(request):
        body = await request.json()
        told.append((body["messages"][-1]["content"], request.headers["Authorization"]))
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for delta, reason in (({"role": "assistant", "content": "It is 5."}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            piece = {
                "id": "1",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": "policy",
                "choices": [choice],
            }
            await out.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        return out

    async def reward(request):
        told.append((await request.json(), request.headers["Authorization"]))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/reward", reward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    ended = []
    try:
        for task in tasks:
            variables = {
                "SLIME_BASE_URL": url,
                "SLIME_API_KEY": "k",
                "PYTHONPATH": str(HERE),
                "SLIME_TASK": json.dumps(task),
            }
            process = await asyncio.create_subprocess_exec(
                str(python),
                verifiers_program.__file__,
                env={**os.environ, **variables},
                stderr=subprocess.PIPE,
            )
            _, said = await asyncio.wait_for(process.communicate(), 120)
            ended.append((process.returncode, said.decode()))
    finally:
        await runner.cleanup()
    return told, ended


@pytest.mark.slow
@pytest.mark.faults
def test_a_task_is_played_by_verifiers_and_its_reward_comes_back(python):
    tasks = [{"metadata": {"verifiers": {"env": ENV, "task": number}}} for number in (3, 1, 9)]
    told, ended = asyncio.run(played(python, *tasks))
    assert told == [
        ("What is 3 + 2?", "Bearer k"),
        ({"reward": 1.0}, "Bearer k"),
        ("What is 1 + 2?", "Bearer k"),
        ({"reward": 0.0}, "Bearer k"),
    ]
    assert [status for status, _ in ended] == [0, 0, 2]
    assert "task 9: the taskset has fewer" in ended[2][1]


def test_a_task_that_is_none_ends_with_status_2(monkeypatch, capsys):
    monkeypatch.setenv("SLIME_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("SLIME_TASK", '{"metadata": {}}')
    assert verifiers_program.main() == 2
    assert "metadata.verifiers: KeyError" in capsys.readouterr().err
