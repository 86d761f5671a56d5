"""`Router`: sglang-router in front of the engines, started by the run or joined."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from slime_core.errors import DeadlineError, EngineError
from slime_core.runtime.processes.ports import ReservedPort, port_is_free
from slime_core.runtime.processes.server_process import ServerProcess

from slime_sglang.generation.response import PartialResponse, ask
from slime_sglang.http.api_key import KEY_VARIABLE, new_key
from slime_sglang.http.client import ConnectionLostError, SglangClient
from slime_sglang.http.request_gate import RequestGate
from slime_sglang.server.prometheus import PrometheusTargets
from slime_sglang.settings.section import SglangSection

logger = logging.getLogger(__name__)

_POLL_S = 0.1
#: Seconds in which a router must be up, and have added or removed a worker.
_DEADLINE_S = 60.0
#: Seconds in which a router that is joined has removed the run's workers when that leaves it.
_LEAVE_S = 5.0
#: The router keeps requests of one key on one worker, by its policies `consistent_hashing` and `manual`.
_SESSION_HEADER = "X-SMG-Routing-Key"
#: A worker that fails three times gets no request for ten seconds. Its health check is `/model_info`: SGLang's `/health`
#: generates a token, which a server that is paused for an update does not.
_LIMITS = {
    "cb_failure_threshold": 3,
    "cb_success_threshold": 1,
    "cb_timeout_duration_secs": 10,
    "health_check_endpoint": "/model_info",
    "health_check_interval_secs": 5,
    "health_check_timeout_secs": 5,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    "retry_max_retries": 3,
}
#: Its own command line refuses two of its policies, imports all of SGLang, and shows the key to every user of the host.
_START = (
    "import json, os, sys; from sglang_router.router import Router; from sglang_router.router_args import RouterArgs; "
    f"key = os.environ.pop({KEY_VARIABLE!r}); "
    "Router.from_args(RouterArgs(**json.loads(sys.argv[1]), api_key=key)).start()"
)


class Router:
    """Sends requests to workers (our servers) by a policy of its own.

    Args:
        policy: how sglang-router chooses a worker.
        address: (host, port) of one that runs already and is joined; a port alone is where one is started.
        width: most requests in flight at once.
        section: the engines' settings: deadlines and retries.
        folder: for its log, and for the file that lists its Prometheus endpoint.
        key: API key that it asks for; None makes one for a router that is started, and none for one that is joined.
        external: URLs of workers that one that is joined may have already.
    """

    def __init__(
        self,
        policy: str,
        *,
        address: tuple[str | None, int | None],
        width: int,
        section: SglangSection,
        folder: Path,
        key: str | None = None,
        external: Collection[str] = (),
    ) -> None:
        host, port = address
        self._held = ReservedPort(), ReservedPort()
        self._port, self._section = port or self._held[0].number, section
        self.url = f"http://{host or '127.0.0.1'}:{self._port}"
        self._width = width
        self._key = key if key is not None or host is not None else new_key()
        self._gate = RequestGate(width)
        self._client: SglangClient | None = None
        self._external, self._added = external, set[str]()
        self._process: ServerProcess | None = None
        self._targets: PrometheusTargets | None = None
        if host is None:
            assert self._key is not None
            self._process = self._child(policy, folder, self._key)

    @property
    def waiting(self) -> int:
        """Requests that wait here, as so many are in flight."""
        return self._gate.waiting

    async def start(self) -> None:
        """Start or join it, and wait until it answers.

        Raises:
            EngineError: its port is in use, it ended, or one that is joined sends requests to engines of others.
            DeadlineError: it did not answer in time.
        """
        if self._process is not None:
            if not port_is_free(self._port):
                raise EngineError(
                    f"--sglang-router-port: port {self._port} of this host is in use; name another one, or give "
                    "--sglang-router-ip to join the router there"
                )
            await self._process.start()
        self._client = SglangClient(
            self.url, connections=self._width + 8, retries=self._section.request_retries, key=self._key
        )
        await self._until(self._is_up, "up")
        if self._process is None:
            await self._check_workers()
        if self._targets is not None:
            self._targets.write()

    async def add(self, url: str, key: str | None) -> None:
        """Add a worker, which asks for an API key, if it is not there; returns once the router counts it as healthy."""
        if url not in self._external or await self._has_not(url):
            self._added.add(url)
            worker = {"url": url, "worker_type": "regular"} | ({} if key is None else {"api_key": key})
            await self._call("POST", "/workers", worker)
        await self._until(lambda: self._has(url), f"sending requests to {url}")

    async def remove(self, url: str) -> None:
        """Remove a worker; returns once it is gone."""
        self._added.discard(url)
        for worker in await self._workers():
            if worker["url"] == url:
                await self._call("DELETE", f"/workers/{worker['id']}")
        await self._until(lambda: self._has_not(url), f"rid of {url}")

    async def extend(self, response: PartialResponse, *, stream: bool, session_id: str | None) -> None:
        """Have one of the workers generate the rest of a response; nothing where an abort came before the request was sent."""
        headers = {_SESSION_HEADER: session_id} if session_id is not None else None
        limit = self._section.request_timeout_s
        await self._gate.pass_through(
            lambda: ask(self._up(), response, stream=stream, timeout_s=limit, headers=headers)
        )

    async def abort(self, end: Callable[[], Awaitable[object]]) -> None:
        """Call `end`, which aborts the workers' requests, until none is in flight."""
        await self._gate.abort(end, timeout_s=self._section.control_timeout_s)

    async def close(self) -> None:
        """Stop it if it was started here, else remove the workers that were added. May be called twice."""
        if self._client is not None:
            if self._process is None:
                await self._leave(self._client)
            await self._client.close()
            self._client = None
        if self._process is not None:
            await self._process.stop()
        if self._targets is not None:
            self._targets.remove()
        for held in self._held:
            held.release()

    async def _check_workers(self) -> None:
        """Check that a router that is joined sends requests to no workers but external engines of the run.

        Raises:
            EngineError: it does; names them.
        """
        there = [worker["url"] for worker in await self._workers() if worker["is_healthy"]]
        others = [url for url in there if url not in self._external]
        if others:
            raise EngineError(
                f"--sglang-router-ip: the router at {self.url} also sends requests to {', '.join(others)}; wanted the engines of "
                "this run alone, as others have other weights; remove them there (DELETE /workers/ID)"
            )

    async def _leave(self, client: SglangClient) -> None:
        """Remove the workers that were added to a router that is joined, and wait until they are gone, as far as it answers."""
        added, self._added = self._added, set()

        async def there() -> list[str]:
            workers = (await client.call("GET", "/workers", timeout_s=_LEAVE_S, flag=None))["workers"]
            return [worker["id"] for worker in workers if worker["url"] in added]

        try:
            async with asyncio.timeout(_LEAVE_S):
                for number in await there():
                    await client.call("DELETE", f"/workers/{number}", timeout_s=_LEAVE_S, flag=None)
                while await there():
                    await asyncio.sleep(_POLL_S)
        except (EngineError, TimeoutError) as error:
            logger.warning("the router at %s keeps workers of this run that has ended: %s", self.url, error)

    def _child(self, policy: str, folder: Path, key: str) -> ServerProcess:
        metrics_port = self._held[1].number
        self._targets = PrometheusTargets(folder, "router", f"127.0.0.1:{metrics_port}")
        arguments = {
            "host": "127.0.0.1",
            "port": self._port,
            "policy": policy,
            "prometheus_host": "127.0.0.1",
            "prometheus_port": metrics_port,
            "log_level": "warn",
            "request_timeout_secs": int(self._section.request_timeout_s) + 1,
            "shutdown_grace_period_secs": 1,
            **_LIMITS,
        }
        return ServerProcess(
            [sys.executable, "-c", _START, json.dumps(arguments)],
            environment={"HF_HUB_OFFLINE": "1", KEY_VARIABLE: key},
            log=folder / "router.log",
            name="sglang-router",
        )

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        return await self._up().call(method, path, body, timeout_s=_DEADLINE_S, flag=None)

    def _up(self) -> SglangClient:
        assert self._client is not None, "the router is not started"
        self._check_alive()
        return self._client

    async def _workers(self) -> list[dict[str, Any]]:
        return list((await self._call("GET", "/workers"))["workers"])

    async def _has(self, url: str) -> bool:
        return any(worker["url"] == url and worker["is_healthy"] for worker in await self._workers())

    async def _has_not(self, url: str) -> bool:
        return all(worker["url"] != url for worker in await self._workers())

    async def _is_up(self) -> bool:
        try:
            await self._workers()
        except ConnectionLostError:
            return False
        return True

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                while not await condition():
                    self._check_alive()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise DeadlineError(f"the router at {self.url} is not {what} after {_DEADLINE_S:g} s") from error

    def _check_alive(self) -> None:
        if self._process is not None and self._process.failure is not None:
            raise EngineError(self._process.failure)
