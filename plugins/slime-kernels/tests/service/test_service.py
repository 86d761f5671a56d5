"""The service over HTTP: the fork's request and answer, the limit, one evaluation for the same question, and a kill."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from slime_core.errors import RewardError
from slime_core.runtime.processes.ports import ReservedPort
from slime_kernels.judge.judging import KernelJudge, judged
from slime_kernels.judge.verdict import EvalStatus, Timing, Verdict
from slime_kernels.section import KernelsSection
from slime_kernels.service.client import ServiceClient
from slime_kernels.service.requests import request_of
from slime_kernels.service.server import serve
from slime_rm.code.sandbox.running import SandboxError
from slime_rm.remote.json_client import TRANSIENT

from ..kernel_corpus import written

PROBLEM, KERNEL, _ = written()["relu"]


class Counting:
    """An evaluator that takes a moment, and counts how many it does at once."""

    def __init__(self, seconds=0.01):
        self.lock, self.now, self.most, self.n, self.seconds = threading.Lock(), 0, 0, 0, seconds

    def evaluate(self, problem, source, *, backend="triton", options=None):
        with self.lock:
            self.now, self.n = self.now + 1, self.n + 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
        return Verdict(status=EvalStatus.COMPILE_ERROR, gate="static", message=source)


@pytest.fixture
def port():
    with ReservedPort() as reserved:
        yield reserved.number


@asynccontextmanager
async def serving(judge, port):
    ready = asyncio.Event()
    task = asyncio.create_task(serve(judge, host="127.0.0.1", port=port, ready=ready))
    await asyncio.wait_for(ready.wait(), 10)
    try:
        yield f"http://127.0.0.1:{port}/eval"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_two_hundred_at_once_are_all_answered_within_the_limit(port):
    async def ask():
        counting = Counting()
        async with serving(KernelJudge(counting, concurrency=4), port) as url:
            client = ServiceClient(KernelsSection(service=url))
            verdicts = await asyncio.gather(*(client.judge(PROBLEM, f"x = {i}") for i in range(200)))
            await client.close()
        return counting, verdicts

    counting, verdicts = asyncio.run(ask())
    assert [verdict.message for verdict in verdicts] == [f"x = {i}" for i in range(200)]
    assert (counting.n, counting.most) == (200, 4)


def test_the_same_question_is_evaluated_once():
    async def ask():
        counting = Counting()
        judge = KernelJudge(counting, concurrency=4)
        await asyncio.gather(*(judge.judge(PROBLEM, "x") for _ in range(20)))
        await judge.judge(PROBLEM, "x")
        return counting.n

    assert asyncio.run(ask()) == 1


def test_a_service_that_is_killed_and_comes_back_loses_nothing(port):
    async def ask():
        counting = Counting(seconds=0.05)
        client = ServiceClient(KernelsSection(service=f"http://127.0.0.1:{port}/eval"))
        async with serving(KernelJudge(counting, concurrency=2), port):
            asked = [asyncio.create_task(client.judge(PROBLEM, f"x = {i}")) for i in range(30)]
            await asyncio.sleep(0.3)
            assert not all(task.done() for task in asked)
        async with serving(KernelJudge(counting, concurrency=8), port):
            verdicts = await asyncio.gather(*asked)
            await client.close()
            return verdicts

    assert [verdict.message for verdict in asyncio.run(ask())] == [f"x = {i}" for i in range(30)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_correct_trials": 0}, "num_correct_trials"),
        ({"custom_model_src": 3}, "custom_model_src"),
        ({"what": 1}, "what"),
        ({"original_model_src": "x"}, "original_model_src: found code without Model"),
    ],
)
def test_a_request_that_is_none_is_refused_with_the_field(change, said, port):
    async def ask():
        async with (
            serving(KernelJudge(Counting(), concurrency=1), port) as url,
            httpx.AsyncClient() as client,
        ):
            answers = await client.post(url, json=request_of(PROBLEM, "x") | change)
            broken = await client.post(url, content=b"{")
            return answers, broken

    answer, broken = asyncio.run(ask())
    assert (answer.status_code, broken.status_code) == (400, 400)
    assert said in answer.json()["error"]


class Judges:
    """Judges all alike, or fails."""

    def __init__(self, answer):
        self.answer, self.n = answer, 0

    def evaluate(self, problem, source, *, backend="triton", options=None):
        self.n += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def asked(port, answer, path="/eval", **settings):
    """Return what a client with a section of these settings has of a service that answers so."""

    async def ask():
        async with serving(KernelJudge(Judges(answer), concurrency=1), port) as url:
            client = ServiceClient(KernelsSection(service=url.replace("/eval", path), **settings))
            try:
                return await judged(client, PROBLEM, "x")
            finally:
                await client.close()

    return asyncio.run(ask())


def test_an_address_that_is_no_service_scores_nothing(port):
    with pytest.raises(RewardError, match="refused with status 404"):
        asked(port, Verdict(status=EvalStatus.CORRECT, gate="fast"), path="/evaluate")


def test_a_service_that_fails_to_evaluate_scores_nothing(port):
    failed = Verdict(status=EvalStatus.SERVER_ERROR, gate="problem", message="the module fails")
    with pytest.raises(RewardError, match=r"\(relu\) is not evaluated: http://.*: the module fails"):
        asked(port, failed)


def test_a_service_without_a_sandbox_says_503_which_is_asked_again(port):
    async def ask():
        judge = KernelJudge(Judges(SandboxError("no namespaces")), concurrency=1)
        async with serving(judge, port) as url, httpx.AsyncClient() as client:
            return await client.post(url, json=request_of(PROBLEM, "x"))

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()) == (503, {"error": "no namespaces"})
    assert answer.status_code in TRANSIENT


def test_the_reward_is_that_of_the_run_and_not_of_the_service(port):
    known = Verdict(status=EvalStatus.INCORRECT, gate="correct", compiled=True, reward=0.1)
    assert asked(port, known).reward == 0.1
    assert asked(port, known, compiled_reward=0.0).reward == 0.0
    fast = Timing(source="cost-model", target="sm_90", runtime_us=1.0, baseline_us=3.0, speedup=3.0)
    right = Verdict(status=EvalStatus.CORRECT, gate="fast", compiled=True, correct=True, timing=fast)
    assert asked(port, right, correct_reward=1.0, most_bonus=0.5).reward == 1.5


def test_the_answer_has_the_form_of_the_fork(evaluator, port):
    async def ask():
        async with (
            serving(KernelJudge(evaluator, concurrency=2), port) as url,
            httpx.AsyncClient() as client,
        ):
            asked = request_of(
                PROBLEM, KERNEL, num_correct_trials=2, num_perf_trials=100, seed=42, verbose=True
            )
            return (await client.post(url, json=asked, timeout=120)).json()

    answer = asyncio.run(ask())
    assert answer["eval_status"] == "completed"
    result = answer["exec_result"]
    assert (result["compiled"], result["correctness"]) == (True, True)
    assert result["runtime"] > 0
    assert result["runtime_stats"]["source"] == "cost-model"
    assert answer["reward"] > 0.3
    assert answer["completed_at"]


def test_a_client_that_was_closed_asks_again_over_connections_of_its_own(port):
    async def ask():
        async with serving(KernelJudge(Counting(), concurrency=1), port) as url:
            client = ServiceClient(KernelsSection(service=url))
            before = connections(port)
            first = await client.judge(PROBLEM, "x = 1")
            during = connections(port)
            await client.close()
            after = connections(port)
            second = await client.judge(PROBLEM, "x = 2")
            await client.close()
            return first.message, second.message, (before, during, after)

    assert asyncio.run(ask()) == ("x = 1", "x = 2", (0, 1, 0))


def connections(port):
    """Connections of this machine to a port of it that are open (proc(5), /proc/net/tcp)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)
