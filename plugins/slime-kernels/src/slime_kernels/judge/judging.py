"""`KernelJudge`: evaluations for many who ask at once, each candidate evaluated once."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from slime_core.errors import RewardError

from slime_kernels.judge.evaluator import Evaluator, EvaluatorSettings, Options
from slime_kernels.judge.reward import scale_of
from slime_kernels.judge.verdict import EvalStatus, Verdict
from slime_kernels.problems.problem import KernelProblem
from slime_kernels.sandbox.fork_server import CandidateServer
from slime_kernels.section import KernelsSection
from slime_kernels.timing.gpus import devices_for
from slime_kernels.timing.measure import TimingPlan

logger = logging.getLogger(__name__)
_MOST_KEPT = 4096


class Judges(Protocol):
    """Whoever judges candidates: this process, or a service."""

    async def judge(
        self, problem: KernelProblem, source: str, *, backend: str = "triton", options: Options | None = None
    ) -> Verdict:
        """Return what becomes of a candidate."""


async def judged(judge: Judges, problem: KernelProblem, source: str) -> Verdict:
    """Return what becomes of a candidate of a run.

    Raises:
        RewardError: the problem itself could not be evaluated: nothing is known of the candidate.
    """
    verdict = await judge.judge(problem, source)
    if verdict.status is EvalStatus.SERVER_ERROR:
        raise RewardError(f"{problem.title} is not evaluated: {verdict.message}")
    return verdict


class KernelJudge:
    """Judges in processes of this machine, so many at once.

    Who asks for what is being evaluated waits for that; verdicts are kept, but for those of a machine
    that failed or was slow, and of correct candidates without a time that is trusted.

    Args:
        evaluator: that decides.
        concurrency: evaluations at once.
    """

    def __init__(self, evaluator: Evaluator, *, concurrency: int) -> None:
        self._evaluator, self._concurrency = evaluator, concurrency
        # Of its own, as the threads of an event loop are 32 at most, and no more than the cores and four.
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="kernels")
        self._free: dict[int, asyncio.Semaphore] = {}
        self._running: dict[tuple[int, str], asyncio.Task[Verdict]] = {}
        self._kept: OrderedDict[str, Verdict] = OrderedDict()
        self.n_evaluated = 0
        """Evaluations that were begun."""

    async def judge(
        self, problem: KernelProblem, source: str, *, backend: str = "triton", options: Options | None = None
    ) -> Verdict:
        """Return what becomes of a candidate; several who wait for one share its evaluation.

        Raises:
            SandboxError: this machine cannot isolate a process; nothing was run.
        """
        text = "\0".join([repr(problem), repr(options), backend, source])
        key = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        place = (id(asyncio.get_running_loop()), key)
        task = self._running.get(place)
        if task is None:
            task = asyncio.create_task(self._evaluate(problem, source, backend, options))
            self._running[place] = task
            task.add_done_callback(lambda _: self._running.pop(place, None))
        verdict = await asyncio.shield(task)
        if _is_final(verdict):
            self._kept[key] = verdict
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return verdict

    async def _evaluate(
        self, problem: KernelProblem, source: str, backend: str, options: Options | None
    ) -> Verdict:
        loop = id(asyncio.get_running_loop())
        free = self._free.setdefault(loop, asyncio.Semaphore(self._concurrency))
        async with free:
            self.n_evaluated += 1
            evaluate = functools.partial(
                self._evaluator.evaluate, problem, source, backend=backend, options=options
            )
            return await asyncio.get_running_loop().run_in_executor(self._threads, evaluate)

    def close(self) -> None:
        """Begin no evaluation any more, and wait for none; the end of an interpreter that ends by itself waits for those that run."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_final(verdict: Verdict) -> bool:
    """Return whether another evaluation would come to the same: what was to be timed has a time that is trusted."""
    if verdict.status in (EvalStatus.TIMEOUT, EvalStatus.SERVER_ERROR):
        return False
    return verdict.gate != "fast" or (verdict.timing is not None and not verdict.timing.doubt)


def evaluator_settings(section: KernelsSection) -> EvaluatorSettings:
    """Return how the settings want candidates to be tried."""
    return EvaluatorSettings(
        targets=tuple(section.targets),
        options=Options(n_trials=section.correct_trials),
        timeout_s=section.eval_timeout_s,
        memory_bytes=section.memory_mb << 20,
        plan=TimingPlan(n=section.timed_calls, most_noise=section.most_noise),
        baseline=section.baseline,
        baseline_dir=Path(section.baseline_dir).expanduser(),
        memory_share=1.0 / section.concurrency,
        scale=scale_of(section),
    )


def judge_of(section: KernelsSection) -> Judges:
    """Return the judge of these settings, the same one each time in a process: what it forks from takes seconds to start.

    Raises:
        ConfigError: a GPU is asked for, and there is none.
    """
    return _judge_of(
        KernelsSection.model_validate(
            section.model_dump(include=set(KernelsSection.model_fields))
        ).model_dump_json()
    )


@functools.lru_cache(maxsize=8)
def _judge_of(settings: str) -> Judges:
    section = KernelsSection.model_validate_json(settings)
    if section.service is not None:
        from slime_kernels.service.client import ServiceClient

        return ServiceClient(section)
    return local_judge(section, CandidateServer())


def local_judge(section: KernelsSection, server: CandidateServer) -> KernelJudge:
    """Return a judge whose evaluations are on this machine, forked from a server.

    Raises:
        ConfigError: a GPU is asked for, and there is none.
    """
    devices = devices_for(section.device)
    if devices is None:
        logger.info(
            "kernels: tried in Triton's interpreter, timed by the cost model of %s", section.targets[0]
        )
    else:
        logger.info("kernels: launched and timed on %s", ", ".join(one.name for one in devices.gpus))
    evaluator = Evaluator(evaluator_settings(section), server, devices=devices)
    return KernelJudge(evaluator, concurrency=section.concurrency)
