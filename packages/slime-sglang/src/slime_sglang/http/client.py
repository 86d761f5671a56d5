"""`SglangClient`: HTTP calls to one SGLang server, each with a deadline, retried only where no server took the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from slime_core.errors import DeadlineError, EngineError

from slime_sglang.http.api_key import key_headers

#: Seconds before the first retry; each further one waits twice as long as the one before.
_FIRST_WAIT_S = 0.2
#: Seconds that an idle connection is kept: less than the 5 after which SGLang's web server closes it.
_KEEP_ALIVE_S = 2.0
#: Status of a server that is up but cannot serve now.
_NOT_READY = frozenset({502, 503, 504})
#: Status of a server that asks for a key, or for another than it was sent.
_REFUSES_KEY = frozenset({401, 403})
#: Prefix of the line of a server-sent event, and the data of the last event of a stream.
_EVENT, _LAST_EVENT = b"data:", b"[DONE]"
#: Characters of an error's answer that are shown.
_SHOWN = 500
#: Seconds by which the timer of a deadline is late at least where this process itself was held up.
_HELD_UP_S = 0.1
#: Flags that set the deadlines: of generation, of health checks, and of every other call.
REQUEST_FLAG, CHECK_FLAG = "--sglang-request-timeout-s", "--rollout-health-check-timeout"
CONTROL_FLAG = "--sglang-control-timeout-s"


class ServerFaultError(EngineError):
    """The server failed at a request; another server may not."""


class ConnectionLostError(ServerFaultError):
    """No connection, or one that closed before the answer: perhaps the server exited."""


class SglangClient:
    """Calls one server. Use it on the event loop that made it.

    Args:
        url: `http://host:port`.
        connections: most connections at once.
        retries: how often a call is repeated that found no connection or a server that was not ready.
        key: API key that the server asks for; None where it asks for none.
    """

    def __init__(self, url: str, *, connections: int, retries: int, key: str | None = None) -> None:
        self.url, self._retries, self._has_key = url, retries, key is not None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=key_headers(key),
        )

    async def get(
        self, path: str, *, timeout_s: float, retries: int | None = None, flag: str | None = CONTROL_FLAG
    ) -> Any:
        """Return the JSON answer to a GET, None where it is empty; see `call`."""
        return await self.call("GET", path, timeout_s=timeout_s, retries=retries, flag=flag)

    async def text(self, path: str, *, timeout_s: float) -> str:
        """Return the answer to a GET as it is; see `call`."""
        return await self._sent(
            lambda: self._text(path), path, timeout_s=timeout_s, retries=0, flag=CONTROL_FLAG, is_read=True
        )

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, flag: str | None = CONTROL_FLAG
    ) -> Any:
        """Return the JSON answer to a POST, None where it is empty; see `call`."""
        return await self.call("POST", path, body, timeout_s=timeout_s, flag=flag)

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        retries: int | None = None,
        headers: Mapping[str, str] | None = None,
        flag: str | None = CONTROL_FLAG,
    ) -> Any:
        """Return the JSON answer to a request, None where it is empty.

        A GET whose deadline passed while this process itself was held up is sent once more: its answer may have been there, or it
        was never sent.

        Args:
            method: of HTTP.
            path: on the server.
            body: sent as JSON; None sends none.
            timeout_s: deadline, retries included.
            retries: None for those that the client was made with.
            headers: to add.
            flag: that sets the deadline, for the error; None where no flag does.

        Raises:
            ConnectionLostError: no connection after all retries, or one that ended before the answer.
            ServerFaultError: an answer with a status from 500 on, or one that is no JSON.
            EngineError: an answer with a status from 400 on: asked again, it would be the same.
            DeadlineError: no answer within `timeout_s` seconds.
        """
        return await self._sent(
            lambda: self._answer(method, path, body, headers),
            path,
            timeout_s=timeout_s,
            retries=retries,
            flag=flag,
            is_read=method == "GET",
        )

    async def drain(self, *, timeout_s: float) -> None:
        """Wait until the server is idle, and flush its KV cache; see `call`."""
        await self._sent(
            lambda: self._flush(timeout_s),
            "/flush_cache",
            timeout_s=timeout_s,
            retries=None,
            flag=CONTROL_FLAG,
        )

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        take: Callable[[Any], None],
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Post a request of generation, and call `take` with the JSON of each event of the answer as it arrives; see `call`.

        Raises:
            ConnectionLostError: also where the answer ended without its last event, or within one.
            ServerFaultError: also where an event is no JSON.
        """
        await self._sent(
            lambda: self._events(path, body, take, headers),
            path,
            timeout_s=timeout_s,
            retries=None,
            flag=REQUEST_FLAG,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _sent[T](
        self,
        send: Callable[[], Awaitable[T]],
        path: str,
        *,
        timeout_s: float,
        retries: int | None,
        flag: str | None,
        is_read: bool = False,
    ) -> T:
        """Return what `send` returns, retried where no server took the request; see `call`, of which a GET `is_read`."""
        again = self._retries if retries is None else retries
        now = asyncio.get_running_loop().time
        late = now() + timeout_s + _HELD_UP_S
        try:
            async with asyncio.timeout(timeout_s):
                for attempt in range(again):
                    try:
                        return await send()
                    except (
                        aiohttp.ClientConnectorError,
                        _NotReadyError,
                    ):  # in neither case the request was taken
                        await asyncio.sleep(_FIRST_WAIT_S * 2**attempt)
                return await send()
        except TimeoutError as error:
            if is_read and now() > late:
                return await self._sent(send, path, timeout_s=timeout_s, retries=retries, flag=flag)
            which = "" if flag is None else f" ({flag})"
            raise DeadlineError(f"{self.url}{path}: no answer after {timeout_s:g} s{which}") from error
        except aiohttp.ClientError as error:
            raise ConnectionLostError(f"{self.url}{path}: {type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; the answer to it is a good one."""
        async with self._session.request(method, self.url + path, json=body, headers=headers) as reply:
            if reply.status in _REFUSES_KEY:
                raise EngineError(self._refused(path, reply.status))
            if reply.status >= 400:
                text = (await reply.text())[:_SHOWN]
                kind = EngineError if reply.status < 500 else ServerFaultError
                if reply.status in _NOT_READY:
                    kind = _NotReadyError
                raise kind(f"{self.url}{path}: status {reply.status}: {text}")
            yield reply

    def _refused(self, path: str, status: int) -> str:
        found = "the key that it was sent is not its own" if self._has_key else "it was sent no key"
        return (
            f"{self.url}{path}: status {status}: {found}; wanted the one that it was started with; of servers and a "
            "router that run already --rollout-external-key-file says where it is"
        )

    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str] | None
    ) -> Any:
        async with self._asked(method, path, body, headers) as reply:
            text = await reply.read()
            return self._parsed(text, path) if text else None

    async def _text(self, path: str) -> str:
        async with self._asked("GET", path, None, None) as reply:
            return await reply.text()

    async def _flush(self, timeout_s: float) -> None:
        async with self._asked("POST", f"/flush_cache?timeout={timeout_s:g}", None, None):
            pass  # the answer is a text for people

    async def _events(
        self,
        path: str,
        body: Mapping[str, Any],
        take: Callable[[Any], None],
        headers: Mapping[str, str] | None,
    ) -> None:
        is_whole = False
        async with self._asked("POST", path, body, headers) as reply:
            async for line in _lines(reply.content):
                if line.startswith(_EVENT):
                    event = line.removeprefix(_EVENT).strip()
                    is_whole = event == _LAST_EVENT
                    if not is_whole:
                        take(self._parsed(event, path))
        if not is_whole:
            raise ConnectionLostError(f"{self.url}{path}: the answer ended before its last event")

    def _parsed(self, text: bytes, path: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            shown = text[:_SHOWN].decode(errors="replace")
            raise ServerFaultError(f"{self.url}{path}: the answer is no JSON ({error}): {shown}") from error


class _NotReadyError(ServerFaultError):
    """The server answered that it cannot serve now."""


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of an answer that are whole, each without its end; one may be of any length."""
    rest = b""
    async for piece in _pieces(content):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


async def _pieces(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield what arrives; where an answer is cut, also what came before the cut and waits to be read.

    aiohttp 3.14 keeps that, and raises instead of handing it out: `readany` in aiohttp/streams.py.
    """
    try:
        async for piece in content.iter_any():
            yield piece
    except aiohttp.ClientError:
        if content._buffer:
            yield content._read_nowait(-1)
        raise
