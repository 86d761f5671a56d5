"""A service that is a process of its own, killed while trajectories wait for it: each goes on when it is back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import httpx
import pytest
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.runtime.processes.ports import ReservedPort
from slime_core.samples import Sample
from slime_kernels.problems.problem import PROBLEM_KEY, PROMPT_KEY
from slime_kernels.service.client import ServiceClient
from slime_kernels.turns.kernel_turns import KernelTurnsSettings, Trajectory
from slime_kernels.turns.record import TURNS_KEY

from ..kernel_corpus import written
from ..turns.test_kernel_turns import Bytes, Says

PROBLEM, KERNEL, _ = written()["relu"]
N = 6


@pytest.fixture
def port():
    with ReservedPort() as reserved:
        yield reserved.number


def start(port):
    command = [sys.executable, "-m", "slime_core", "kernels", "serve", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert b"POST http" in process.stdout.readline()
    return process


def kill(process):
    process.kill()
    process.wait()
    process.stdout.close()


def evaluations(port):
    return httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).json()["evaluations"]


def sample(index):
    made = {"text": "Do it.", "chat": True, "template_kwargs": {}}
    metadata = {PROBLEM_KEY: PROBLEM.to_dict(), PROMPT_KEY: made}
    return Sample(index=index, prompt="Do it.", tokens=list(b"Do it."), label=PROBLEM.code, metadata=metadata)


def trajectory(index, client):
    """Two turns, with a kernel that is no other trajectory's."""
    engine = Says(*(f"```python\n{KERNEL}# {index} {turn}\n```" for turn in range(2)))
    ctx = GenerateContext(engine=engine, tokenizer=Bytes())
    settings = KernelTurnsSettings(kernel_max_turns=2)
    return Trajectory(ctx, sample(index), SamplingParams(max_new_tokens=20_000), settings, client).play()


@pytest.mark.slow
@pytest.mark.faults
def test_no_trajectory_is_lost_where_the_service_is_killed(port):
    first = start(port)
    client = ServiceClient(KernelTurnsSettings(service=f"http://127.0.0.1:{port}/eval", correct_trials=2))

    async def ask():
        tasks = [asyncio.create_task(trajectory(index, client)) for index in range(N)]
        deadline = time.monotonic() + 120
        while await asyncio.to_thread(evaluations, port) < 3 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        kill(first)
        assert not all(task.done() for task in tasks)
        second = await asyncio.to_thread(start, port)
        try:
            return await asyncio.gather(*tasks)
        finally:
            kill(second)

    results = asyncio.run(ask())
    assert [one.index for one in results] == list(range(N))
    for one in results:
        record = one.metadata[TURNS_KEY]
        assert record["ended_by"] in ("max_turns", "fast_enough")
        assert all(entry["eval_result"]["status"] == "correct" for entry in record["history"])
        one.check(vocab_size=256)
