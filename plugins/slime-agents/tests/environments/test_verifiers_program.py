"""The agent program for environments of verifiers v1, which uv installs into an environment of their own."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path

import pytest
from slime_agents.endpoints.agent import Agent
from slime_agents.environments import verifiers_program
from slime_agents.section import AgentsSection
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample, Status

from ..byte_chat import ByteChat, SayingEngine
from ..endpoints.running import check_tape, no_plugins

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


async def played(program, *tasks):
    """Return the sample of each task, played through the run's own endpoint; the policy says `It is 5.` whatever it is asked."""
    settings = AgentsSection(program=program, reward="http", timeout_s=120, max_turns=3)
    engine = SayingEngine(lambda text: "It is 5.")
    agent = Agent(settings=settings, resolve=no_plugins)
    ctx, params = GenerateContext(engine=engine, tokenizer=ByteChat()), SamplingParams(max_new_tokens=200)
    prompt = [{"role": "user", "content": "as verifiers says"}]
    told = [{"verifiers": {"env": ENV, "task": task}} for task in tasks]
    samples = [Sample(index=i, group_index=0, prompt=prompt, metadata=one) for i, one in enumerate(told)]
    try:
        return await asyncio.gather(*(agent(ctx, sample, params) for sample in samples)), engine
    finally:
        await agent.close()


@pytest.fixture(params=["started for each", "served"])
def program(python, request, tmp_path, monkeypatch):
    """The command line that plays a task."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # where the taskset is
    words = [str(python), verifiers_program.__file__]
    if request.param == "started for each":
        yield words
        return
    path = str(tmp_path / "verifiers")
    with subprocess.Popen([*words, "serve", path], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout.readline() == f"verifiers is served at {path}\n"
        yield [sys.executable, verifiers_program.__file__, "ask", path]
        serving.terminate()


@pytest.mark.slow
@pytest.mark.faults
def test_tasks_are_played_by_verifiers_and_trained_token_for_token(program):
    (right, wrong, none), engine = asyncio.run(played(program, 3, 1, 9))
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.metadata["agent"]["ended_by"] == "exit"
    prompts = [ByteChat().decode(tokens, skip_special_tokens=False) for tokens, _, _ in engine.requests]
    assert sum("What is 3 + 2?" in prompt for prompt in prompts) == 1
    assert sum("What is 1 + 2?" in prompt for prompt in prompts) == 1
    assert len(prompts) == 2
    check_tape([right, wrong], engine)
    assert none.status is Status.FAILED
    assert "task 9: the taskset has fewer" in none.failure


def test_a_socket_that_nobody_serves_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SLIME_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setattr("sys.stdin", io.StringIO('{"metadata": {"verifiers": {}}}'))
    assert verifiers_program.main(["ask", str(tmp_path / "none")]) == 1
    assert "start it by verifiers_program.py serve" in capsys.readouterr().err


def test_a_task_that_is_none_ends_with_status_2(monkeypatch, capsys):
    monkeypatch.setenv("SLIME_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setattr("sys.stdin", io.StringIO('{"metadata": {}}'))
    assert verifiers_program.main([]) == 2
    assert "metadata.verifiers: KeyError" in capsys.readouterr().err
