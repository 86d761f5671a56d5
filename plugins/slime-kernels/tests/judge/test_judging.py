"""The judge over evaluators that only answer: how many work at once, and which verdicts are kept."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from slime_kernels.judge.judging import KernelJudge
from slime_kernels.judge.verdict import EvalStatus, Timing, Verdict

from ..kernel_corpus import written

PROBLEM, KERNEL, _ = written()["relu"]


def test_as_many_evaluations_as_asked_for_run_at_once():
    """More than an event loop has threads of its own."""
    n = min(32, (os.cpu_count() or 1) + 4) + 2
    barrier = threading.Barrier(n)

    class Meeting:
        def evaluate(self, problem, source, *, backend, options):
            barrier.wait(timeout=20)  # for all others
            return Verdict(status=EvalStatus.REJECTED, gate="static", message=source)

    async def ask():
        judge = KernelJudge(Meeting(), concurrency=n)
        try:
            return await asyncio.gather(*(judge.judge(PROBLEM, f"x = {i}") for i in range(n)))
        finally:
            judge.close()

    assert [verdict.message for verdict in asyncio.run(ask())] == [f"x = {i}" for i in range(n)]


def correct(gate="fast", **timing):
    measured = {
        "source": "cuda-events",
        "target": "a GPU",
        "runtime_us": 1.0,
        "baseline_us": 2.0,
        "speedup": 2.0,
    }
    told = Timing(**measured | timing) if timing else None
    return Verdict(status=EvalStatus.CORRECT, gate=gate, compiled=True, correct=True, timing=told)


@pytest.mark.parametrize(
    ("first", "n_evaluated"),
    [
        (correct(doubt="noise of 60.0%"), 2),
        (correct(), 2),  # not timed: no memory was left, say
        (Verdict(status=EvalStatus.TIMEOUT, gate="correct"), 2),
        (Verdict(status=EvalStatus.SERVER_ERROR, gate="problem"), 2),
        (correct(doubt=""), 1),
        (correct(gate="correct"), 1),  # its time was not asked for
        (Verdict(status=EvalStatus.INCORRECT, gate="correct"), 1),
    ],
)
def test_a_verdict_of_a_disturbed_machine_is_given_once_and_not_kept(first, n_evaluated):
    later = correct(speedup=1.5)

    class Answers:
        def __init__(self):
            self.left = [first, later]

        def evaluate(self, problem, source, *, backend, options):
            return self.left.pop(0)

    async def ask():
        judge = KernelJudge(Answers(), concurrency=1)
        told = [await judge.judge(PROBLEM, KERNEL) for _ in range(3)]
        judge.close()
        return told, judge.n_evaluated

    told, n = asyncio.run(ask())
    assert n == n_evaluated
    assert told == [first, *[later if n == 2 else first] * 2]
