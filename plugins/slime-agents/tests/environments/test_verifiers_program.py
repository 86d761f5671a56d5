"""The agent program for environments of verifiers v1, which uv installs into an environment of their own."""

from __future__ import annotations

import asyncio
import subprocess
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


async def played(python, *tasks):
    """Return the sample of each task, played through the run's own endpoint; the policy says `It is 5.` whatever it is asked."""
    settings = AgentsSection(
        program=[str(python), verifiers_program.__file__], reward="http", timeout_s=120, max_turns=3
    )
    engine = SayingEngine(lambda text: "It is 5.")
    agent = Agent(settings=settings, resolve=no_plugins)
    ctx, params = GenerateContext(engine=engine, tokenizer=ByteChat()), SamplingParams(max_new_tokens=200)
    samples = []
    try:
        for index, task in enumerate(tasks):
            told = {"verifiers": {"env": ENV, "task": task}}
            prompt = [{"role": "user", "content": "as verifiers says"}]
            sample = Sample(index=index, group_index=0, prompt=prompt, metadata=told)
            samples.append(await agent(ctx, sample, params))
    finally:
        await agent.close()
    return samples, engine


@pytest.mark.slow
@pytest.mark.faults
def test_a_task_is_played_by_verifiers_and_trained_token_for_token(python, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # where the taskset is
    (right, wrong, none), engine = asyncio.run(played(python, 3, 1, 9))
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.metadata["agent"]["ended_by"] == "exit"
    prompts = [ByteChat().decode(tokens, skip_special_tokens=False) for tokens, _, _ in engine.requests]
    assert ["What is 3 + 2?" in prompts[0], "What is 1 + 2?" in prompts[1], len(prompts)] == [True, True, 2]
    check_tape([right, wrong], engine)
    assert none.status is Status.FAILED and "task 9: the taskset has fewer" in none.failure


def test_a_task_that_is_none_ends_with_status_2(monkeypatch, capsys):
    monkeypatch.setenv("SLIME_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("SLIME_TASK", '{"metadata": {}}')
    assert verifiers_program.main() == 2
    assert "metadata.verifiers: KeyError" in capsys.readouterr().err
