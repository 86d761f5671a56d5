"""Prefill-decode disaggregation: one request of a `prefill` engine and a `decode` engine.

Both engines get the request. The prefill engine computes the prompt's KV cache and the first token and transfers them to
the decode engine, which answers. How their servers are started is in `server.disaggregation`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from slime_core.errors import DeadlineError, EngineError

#: Seconds that the prefill engine gets to answer after the decode engine has.
_PREFILL_ANSWER_S = 1.0
#: Seconds that an engine gets to answer after its request was aborted.
_ABORT_GRACE_S = 10.0
_POLL_S = 0.25


class PairedEngine(Protocol):
    """One of the two engines, as a request sees it."""

    async def prefill(self, body: Mapping[str, Any]) -> Any:
        """Compute a prompt's KV cache and transfer it; None where an abort came before the request was sent."""

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call the server for something other than generation."""


@dataclass(frozen=True)
class PrefillDecodePair:
    """The two engines of one request, and how they find each other."""

    prefill_engine: PairedEngine
    decode_engine: PairedEngine
    bootstrap_address: str
    """`host:port` of the prefill engine, where the decode engine asks for the cache."""
    room: int
    """Number of this request, unlike that of any other; from 1 on."""
    on_prefill: Callable[[], object] = lambda: None
    """Called when the request is handed to the prefill engine."""

    @property
    def request_id(self) -> str:
        """Id of the request at both engines. All have one length: SGLang aborts every request whose id begins with the given one."""
        return f"{self.room:032x}"

    def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body for both engines, made from the body of a request to a single one."""
        host, _, port = self.bootstrap_address.rpartition(":")
        meeting = {
            "bootstrap_host": host,
            "bootstrap_port": int(port),
            "bootstrap_room": self.room,
            "rid": self.request_id,
        }
        return {**body, **meeting}

    async def run(self, body: Mapping[str, Any], decoding: Awaitable[None]) -> None:
        """Await both requests, and abort the other where one fails; the answer is the decode engine's.

        SGLang itself waits for minutes until it counts the other engine as lost, and holds memory for it meanwhile.

        Args:
            body: of the request, as `body` returns it.
            decoding: the request to the decode engine.

        Raises:
            EngineError: one of the engines failed at the request.
            DeadlineError: one took too long.
        """
        prefill = asyncio.ensure_future(self._prefill(body))
        decode = asyncio.ensure_future(decoding)
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and prefill.exception() is None and prefill.result() is not None:
                await asyncio.wait({decode})
            if not decode.done():  # the prompt's cache will not come
                await self._abort(self.decode_engine, decode)
            await asyncio.wait({prefill}, timeout=_PREFILL_ANSWER_S)
            if not prefill.done():
                await self._abort(self.prefill_engine, prefill)
            if not decode.done() or decode.exception() is not None:
                await prefill  # whose failure, if there is one, caused that of the decode engine
            await decode
        finally:
            for request in (prefill, decode):
                request.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    async def _prefill(self, body: Mapping[str, Any]) -> Any:
        self.on_prefill()
        return await self.prefill_engine.prefill({**body, "stream": False})

    async def _abort(self, engine: PairedEngine, request: asyncio.Future[Any]) -> None:
        """Abort the request at one engine, and wait until it has answered, for a bounded time."""
        with contextlib.suppress(TimeoutError, EngineError, DeadlineError):  # the request fails anyway
            async with asyncio.timeout(_ABORT_GRACE_S):
                while not request.done():  # it may have reached the server after the last call
                    await engine.control("/abort_request", {"rid": self.request_id})
                    await asyncio.wait({request}, timeout=_POLL_S)
