"""`slime bench kernels`: evaluations of kernels, some of which misbehave, beside as many of good ones."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from slime_core.runtime.processes.tree import descendants
from slime_kernels.judge.evaluator import Evaluator, EvaluatorSettings, Options
from slime_kernels.judge.verdict import EvalStatus, Verdict
from slime_kernels.problems.examples import example_of, skeleton_of
from slime_kernels.problems.generated import generated_problems
from slime_kernels.problems.problem import KernelProblem, filled
from slime_kernels.sandbox.fork_server import CandidateServer
from slime_rm.code.sandbox.running import SandboxError

GOOD = "good"
#: Kind -> what a candidate does where it is called. No static gate is asked: what is to hold here is the sandbox.
BAD = {
    "hangs": "while True: pass",
    "sleeps": "time.sleep(10**6)",
    "crashes": "os.kill(os.getpid(), 11)",
    "exits": "os._exit(0)",
    "forks": "while True: os.fork()",
    "eats memory": "kept = []\n        while True: kept.append(bytearray(1 << 26))",
    "floods output": "while True: print('x' * 100000)",
    "raises": "raise ValueError('no')",
}
_MEMORY_BYTES = 1 << 30
_LEFT_S = 10.0


@dataclass(frozen=True)
class Pass:
    """So many evaluations."""

    seconds: float
    kinds: Sequence[str]
    verdicts: Sequence[Verdict]

    @property
    def statuses(self) -> Counter[tuple[str, str]]:
        """(kind, status) -> how often."""
        return Counter(zip(self.kinds, (str(one.status) for one in self.verdicts), strict=True))

    @property
    def wrong(self) -> int:
        """Verdicts that are not on the candidate: a good one that is not correct, a bad one that is, or none at all."""
        return sum(
            one.correct != (kind == GOOD) or one.status is EvalStatus.SERVER_ERROR
            for kind, one in zip(self.kinds, self.verdicts, strict=True)
        )


def kernels(argv: list[str]) -> int:
    """Measure evaluations a second of good candidates, and of as many with a share of bad ones.

    Exit status 1 when a verdict is wrong, or a process or a folder is left behind.
    """
    arguments = _parse(argv)
    server = CandidateServer()
    server.start()
    with contextlib.closing(server), own_temporary_folder() as folder:
        settings = EvaluatorSettings(
            options=Options(n_trials=2), timeout_s=arguments.timeout_s, memory_bytes=_MEMORY_BYTES
        )
        evaluator = Evaluator(settings, server, static_gate=lambda tree: ())
        n, workers = arguments.evaluations, arguments.concurrency
        run(evaluator, [GOOD] * workers, workers)  # the problem's facts, once
        assert server.pid is not None
        there = descendants(server.pid)  # what all evaluations are forked from
        clean = run(evaluator, [GOOD] * n, workers)
        bad = run(evaluator, kinds_of(n, share=arguments.bad, seed=arguments.seed), workers)
        left = left_behind(server.pid, there, folder)
    _tell(clean, bad, left, arguments)
    return 1 if clean.wrong or bad.wrong or left else 0


def kinds_of(n: int, *, share: float, seed: int) -> list[str]:
    """Return the kinds of n candidates: a share of bad ones, all kinds alike, at places that are drawn."""
    n_bad = round(n * share)
    names = list(BAD)
    kinds = [names[number % len(names)] for number in range(n_bad)] + [GOOD] * (n - n_bad)
    random.Random(seed).shuffle(kinds)
    return kinds


def run(evaluator: Evaluator, kinds: Sequence[str], concurrency: int) -> Pass:
    """Evaluate a candidate of each kind, so many at once."""
    (problem,), _ = generated_problems(1, families=["elementwise"])
    sources = [f"{_source(problem, kind)}# {number}\n" for number, kind in enumerate(kinds)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        verdicts = list(pool.map(lambda source: _verdict(evaluator, problem, source), sources))
    return Pass(time.perf_counter() - begin, kinds, verdicts)


def _verdict(evaluator: Evaluator, problem: KernelProblem, source: str) -> Verdict:
    """Evaluate; an evaluation that could not begin is one without a verdict, and no reason to lose those of the others."""
    try:
        return evaluator.evaluate(problem, source)
    except SandboxError as error:
        return Verdict(status=EvalStatus.SERVER_ERROR, gate="sandbox", message=str(error))


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """Have this process make temporary files in a folder of its own within the context: others evaluate beside it."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


def left_behind(server: int, processes: set[int], folder: Path) -> list[str]:
    """Return processes below the server's that were not there before, and what is in the folder; waits for what is ending."""
    deadline = time.monotonic() + _LEFT_S
    while True:
        found = [f"process {pid}" for pid in sorted(descendants(server) - processes)]
        found += sorted(map(str, folder.iterdir()))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _source(problem: KernelProblem, kind: str) -> str:
    problem = replace(problem, skeleton=skeleton_of(problem))
    good = filled(problem.skeleton, str(example_of(problem)))
    if kind == GOOD:
        return good
    bad = good.replace("        out = ", f"        {BAD[kind]}\n        out = ", 1)
    return f"import os\nimport time\n{bad}"


def _tell(clean: Pass, bad: Pass, left: Sequence[str], arguments: argparse.Namespace) -> None:
    console = Console(soft_wrap=True, highlight=False)
    n = arguments.evaluations
    console.print(
        f"{n} evaluations, {arguments.concurrency} at once on {os.cpu_count()} cores, deadline {arguments.timeout_s:g} s"
    )
    console.print(f"  {n / clean.seconds:6.2f} a second  all good")
    console.print(f"  {n / bad.seconds:6.2f} a second  {arguments.bad:.0%} misbehave")
    console.print(f"  {clean.seconds / bad.seconds:6.2f}  with those that misbehave / all good")
    for (kind, status), count in sorted(bad.statuses.items()):
        console.print(f"  {count:6d}  {kind}: {status}")
    console.print(f"wrong verdicts: {clean.wrong + bad.wrong}; left behind: {', '.join(left) or 'nothing'}")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("slime bench kernels", description=kernels.__doc__)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--bad", type=float, default=0.05, help="share of candidates that misbehave")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=5.0, help="deadline of each process")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)
