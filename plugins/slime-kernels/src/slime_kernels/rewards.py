"""The reward `kernels`: what becomes of the candidate in a response."""

from __future__ import annotations

from slime_core.errors import SampleError
from slime_core.rewards.results import Grade
from slime_core.samples import Sample

from slime_kernels.judge.judging import judge_of, judged
from slime_kernels.problems.problem import PROBLEM_KEY, problem_from
from slime_kernels.section import KernelsSection
from slime_kernels.turns.extraction import candidate_of
from slime_kernels.turns.history import no_code


class KernelsReward:
    """Scores the last fenced block of Python in a response as a kernel for the problem: 0.1 compiled, 0.3 correct, and a bonus.

    Where the problem has a skeleton, the response is what is missing in it.

    The problem comes from the sources `kernelbench` or `kernel-problems`. Parts are `compiled`, `correct` and `speedup`; details
    tell the status and why.

    Args:
        settings: how candidates are evaluated.
    """

    def __init__(self, *, settings: KernelsSection) -> None:
        self._judge = judge_of(settings)
        self.connections = settings.concurrency
        """Calls at once: the deadline of one begins when its evaluation may."""

    async def __call__(self, sample: Sample) -> Grade:
        """Score a sample.

        Raises:
            SampleError: the sample is of another source.
            RewardError: its problem could not be evaluated.
            SandboxError: this machine cannot isolate a process; nothing was run.
        """
        if PROBLEM_KEY not in sample.metadata:
            raise SampleError(
                f"{sample.name}: metadata has no {PROBLEM_KEY!r}; choose --data-source-path kernelbench or kernel-problems"
            )
        problem = problem_from(sample.metadata[PROBLEM_KEY])
        code = candidate_of(sample.response, problem.skeleton)
        verdict = no_code() if code is None else await judged(self._judge, problem, code)
        timing = verdict.timing
        return Grade(
            score=verdict.reward,
            parts={
                "compiled": float(verdict.compiled),
                "correct": float(verdict.correct),
                "speedup": verdict.speedup,
            },
            details={
                "status": str(verdict.status),
                "gate": verdict.gate,
                "why": verdict.message[:500],
                "time_is_from": None if timing is None else timing.source,
                "time_is_on": None if timing is None else timing.target,
            },
        )
