"""`slime kernels`: serve evaluations, evaluate one candidate, or report on a run."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from slime_core.data.rows.open_rows import read_rows
from slime_core.errors import DataError, SlimeError

from slime_kernels.judge.judging import KernelJudge, local_judge
from slime_kernels.problems.problem import KernelProblem, check_source, problem_of
from slime_kernels.section import KernelsSection


def main(argv: list[str]) -> int:
    """Run `slime kernels serve`, `eval` or `report`; returns the exit status.

    A candidate that is not correct ends `eval` with 1, bad input either with 2.
    """
    parser = argparse.ArgumentParser(
        "slime kernels", description="Kernels: an evaluation service, one evaluation, and a report on a run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="answer POST /eval, in the kernel fork's form")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=18188)
    one = commands.add_parser("eval", help="evaluate one candidate and print the answer of the service")
    one.add_argument(
        "problem", help="a module in KernelBench's format (.py), or a row of it: problems.jsonl@[3:4]"
    )
    one.add_argument("candidate", type=Path, help="a module with class ModelNew")
    told = commands.add_parser("report", help="tables and a picture of what became of a run's kernels")
    told.add_argument("run", type=Path, help="the folder of a run")
    told.add_argument("--picture", type=Path, help="where the picture goes; RUN/kernels.png when not given")
    for each in (server, one):
        each.add_argument("--targets", nargs="+", default=["sm_90"], choices=["sm_80", "sm_90", "gfx942"])
        each.add_argument(
            "--device",
            default="auto",
            choices=["auto", "cpu", "cuda"],
            help="try and time on GPUs (cuda), or interpret and estimate (cpu); auto: on GPUs where there are any",
        )
        each.add_argument("--concurrency", type=int, default=2)
        each.add_argument("--timeout-s", type=float, default=60.0)
    given = parser.parse_args(argv)
    try:
        if given.command == "report":
            from slime_kernels.report.command import report

            return report(given.run, given.picture)
        section = KernelsSection(
            targets=given.targets,
            device=given.device,
            concurrency=given.concurrency,
            eval_timeout_s=given.timeout_s,
        )
        if given.command == "serve":
            return _serve(section, given.host, given.port)
        return _eval(section, given.problem, given.candidate)
    except (SlimeError, OSError, ValueError) as error:
        print(f"slime kernels: {error}", file=sys.stderr)
        return 2


def _judge(section: KernelsSection) -> KernelJudge:
    from slime_kernels.sandbox.fork_server import CandidateServer

    server = CandidateServer()
    judge = local_judge(section, server)
    server.start()
    return judge


def _serve(section: KernelsSection, host: str, port: int) -> int:
    from slime_kernels.service.server import serve

    async def until_interrupted() -> None:
        judge, ready = _judge(section), asyncio.Event()
        task = asyncio.create_task(serve(judge, host=host, port=port, ready=ready))
        await asyncio.wait([task, asyncio.create_task(ready.wait())], return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            print(f"slime kernels: POST http://{host}:{port}/eval", flush=True)
        try:
            await task
        finally:
            judge.close()

    try:
        asyncio.run(until_interrupted())
    except KeyboardInterrupt:
        return 130
    return 0


def _eval(section: KernelsSection, problem: str, candidate: Path) -> int:
    found = _problem(problem)
    verdict = asyncio.run(_judge(section).judge(found, candidate.read_text()))
    print(json.dumps(verdict.envelope(), indent=2))
    return 0 if verdict.correct else 1


def _problem(spec: str) -> KernelProblem:
    if spec.endswith(".py"):
        code = Path(spec).read_text()
        check_source(code, spec)
        return KernelProblem(level=1, problem_id=0, name=Path(spec).stem, code=code)
    rows = read_rows(spec, most=2)
    if len(rows) != 1:
        raise DataError(f"{spec}: found {len(rows)} rows or more; wanted one: FILE@[3:4]")
    return problem_of(rows[0])
