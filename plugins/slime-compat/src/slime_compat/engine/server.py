"""`EngineServer`: the run's engine behind the HTTP interface of an SGLang server, on this machine alone.

Functions that were written for the reference system post to `http://{args.sglang_router_ip}:{args.sglang_router_port}/generate`
by a client of their choice. Requests pass the run's limit and end when the rollout is over, as those of other generators do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web
from slime_core.errors import DataError, SlimeError
from slime_core.protocols import GenerateContext
from slime_core.rollout.recorded_engine import RecordedEngine

from slime_compat.engine.requests import answer, versions_in

logger = logging.getLogger(__name__)

#: Name of the server among a run's services.
SERVICE = "slime-compat"
HOST = "127.0.0.1"
_LARGEST_REQUEST = 1 << 30


class EngineServer:
    """Serves `/generate` for one run. Started by the first function that is called, and closed with the run."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._context: GenerateContext | None = None
        self._calls: dict[int, set[str]] = {}
        self.port = 0
        """Port that it listens on; 0 before `start`."""
        self.version: str | None = None
        """Weights that answered the newest request; None before the first."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    async def start(self, context: GenerateContext) -> None:
        """Listen, if it does not yet, and answer from now on by the engine of `context`."""
        self._context = context
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=_LARGEST_REQUEST)
            app.router.add_post("/generate", self._generate)
            app.router.add_get("/health", self._health)
            app.router.add_get("/health_generate", self._health)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, HOST, 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._runner = runner

    async def close(self) -> None:
        """Stop listening. May be called twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @contextlib.contextmanager
    def noting(self, versions: set[str]) -> Iterator[None]:
        """Add the weights that answer each request that comes in this block; whose it is, a request does not say."""
        self._calls[id(versions)] = versions
        try:
            yield
        finally:
            del self._calls[id(versions)]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        context = self._context
        assert context is not None
        calls = list(self._calls.values())  # not those that begin later: it may be older than their weights
        engine = context.engine.engine if isinstance(context.engine, RecordedEngine) else context.engine
        try:
            payload = await request.json()
            if not isinstance(payload, Mapping):
                raise DataError(f"/generate: found {type(payload).__name__}; wanted a JSON object")
            session = request.headers.get("X-SMG-Routing-Key")
            told: dict[str, Any] = await answer(payload, engine, context.tokenizer, session_id=session)
        except (DataError, ValueError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        except SlimeError as error:
            logger.warning("/generate: %s", error)
            return web.json_response({"error": {"message": str(error)}}, status=500)
        self.version = told["meta_info"]["weight_version"] or self.version
        for versions in calls:
            versions.update(versions_in(told["meta_info"]))
        return web.json_response(told)
