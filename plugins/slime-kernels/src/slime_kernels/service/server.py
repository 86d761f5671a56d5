"""The server: `POST /eval` judges a candidate, `GET /health` says what it is doing."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from slime_core.errors import DataError
from slime_rm.code.sandbox.running import SandboxError

from slime_kernels.judge.evaluator import Options
from slime_kernels.judge.judging import KernelJudge
from slime_kernels.service.requests import EvalRequest

#: Most bytes of a request.
_MOST_BYTES = 4 << 20
_JUDGE = web.AppKey("judge", KernelJudge)


def application(judge: KernelJudge) -> web.Application:
    """Return the service over a judge, whose limit of evaluations at once is the service's."""
    app = web.Application(client_max_size=_MOST_BYTES)
    app[_JUDGE] = judge
    app.router.add_post("/eval", _evaluate)
    app.router.add_get("/health", _health)
    return app


async def serve(judge: KernelJudge, *, host: str, port: int, ready: asyncio.Event | None = None) -> None:
    """Serve until cancelled.

    Raises:
        OSError: the address is taken.
    """
    runner = web.AppRunner(application(judge), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        if ready is not None:
            ready.set()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "evaluations": request.app[_JUDGE].n_evaluated})


async def _evaluate(request: web.Request) -> web.Response:
    """Judge a candidate; a request that is none is refused with 400, and what a candidate does is an answer.

    Where this machine cannot evaluate, 503: another one may, or this one later.
    """
    try:
        asked = EvalRequest.model_validate_json(await request.read(), strict=True)
        problem = asked.problem()
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return _refused("; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found))
    except (DataError, json.JSONDecodeError, UnicodeDecodeError) as error:
        return _refused(str(error))
    options = Options(
        n_trials=asked.num_correct_trials,
        seed=asked.seed,
        measure=asked.measure_performance and asked.num_perf_trials > 0,
    )
    try:
        verdict = await request.app[_JUDGE].judge(
            problem, asked.custom_model_src, backend=asked.backend, options=options
        )
    except SandboxError as error:
        return _refused(str(error), status=503)
    envelope = verdict.envelope() | {"completed_at": datetime.now(UTC).isoformat()}
    if not asked.verbose:
        _shorten(envelope)
    return web.json_response(envelope)


def _shorten(envelope: dict[str, Any]) -> None:
    result = envelope["exec_result"]
    result["metadata"]["kernels"] = []
    if result["runtime_stats"]:
        result["runtime_stats"]["parts"] = {}


def _refused(why: str, status: int = 400) -> web.Response:
    return web.json_response({"error": why[:2000]}, status=status)
