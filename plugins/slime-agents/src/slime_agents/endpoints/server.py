"""`Endpoint`: the HTTP server that the sessions of a run ask, each by an address and a key of its own."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web
from slime_core.errors import DataError, PluginError
from slime_core.files.json_text import parse_json

from slime_agents.endpoints import anthropic, chat, responses
from slime_agents.endpoints.asking import Ask, Dialect, Refused
from slime_agents.endpoints.session import Session
from slime_agents.tape.turn import TapeTurn

logger = logging.getLogger(__name__)

#: Paths after a session's address, `v1` left out: packages put it there, or leave it to the address.
DIALECTS: Mapping[str, Dialect] = {"chat/completions": chat, "responses": responses, "messages": anthropic}
#: Seconds of silence in a stream after which a line without meaning keeps the connection open.
KEEP_ALIVE_S = 10.0


class Endpoint:
    """The server of a run. Belongs to one event loop.

    Args:
        host: address that it listens at.
        port: a free one when 0.
        max_request_bytes: of one request.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, max_request_bytes: int = 1 << 24) -> None:
        self._host, self._port, self._max_bytes = host, port, max_request_bytes
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Base of all addresses, once it is open."""

    async def open(self) -> None:
        """Listen.

        Raises:
            PluginError: the port is taken, or the address is not this machine's.
        """
        app = web.Application(client_max_size=self._max_bytes)
        app.router.add_route("*", "/sessions/{session}/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise PluginError(
                f"agents.host, agents.port: cannot listen at {self._host}:{self._port}: {error.strerror}; choose "
                "another port, or 0 for a free one"
            ) from error
        port = self._runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        """Answer nobody any more."""
        if self._runner is not None:
            await self._runner.cleanup()

    def add(self, session: Session) -> str:
        """Answer a session from now on; returns its base URL, to which packages add what they ask."""
        self._sessions[session.id] = session
        return f"{self.url}/sessions/{session.id}/v1"

    async def remove(self, session: Session) -> None:
        """Answer a session no more: its key is void from here on."""
        self._sessions.pop(session.id, None)
        await session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.match_info["path"].strip("/").split("/")
        while parts and parts[0] == "v1":
            parts = parts[1:]
        path = "/".join(parts)
        dialect = DIALECTS.get(path, anthropic if path.startswith("messages") else chat)
        session: Session | None = None
        try:
            session = self._session(request)
            return await self._answer(request, session, path)
        except Refused as refused:
            return _refusal(session, refused, dialect)
        except DataError as error:
            return _refusal(session, Refused(400, "invalid_request", str(error)), dialect)
        except web.HTTPRequestEntityTooLarge:
            told = f"the request has more than {self._max_bytes} bytes"
            return _refusal(session, Refused(413, "too_large", told), dialect)

    def _session(self, request: web.Request) -> Session:
        """Return the session that a request belongs to, by its address and its key together."""
        named = request.match_info["session"]
        session = self._sessions.get(named)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if session is not None and hmac.compare_digest(session.key.encode(), key.encode()):
            return session
        others = session is not None and any(one.key == key for one in self._sessions.values())
        why = "the key of another session" if others else "a wrong key" if session else "an unknown session"
        logger.warning(
            "agents: a request to session %.40s from %s is refused: %s", named, request.remote, why
        )
        if session is not None:
            session.refused("wrong_key")
        # One answer for all: a stranger learns neither which sessions there are nor whose key it has.
        raise Refused(401, "invalid_api_key", "found no session of that address and key; it may be over")

    async def _answer(self, request: web.Request, session: Session, path: str) -> web.StreamResponse:
        if path == "models" and request.method == "GET":
            return web.json_response(
                {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "slime"}]}
            )
        if request.method != "POST":
            raise Refused(
                404, "not_found", f"found {request.method} {path}; wanted POST {', '.join(DIALECTS)}"
            )
        body = await _body(request)
        if path == "reward":
            return _take_reward(session, body)
        if path == "messages/count_tokens":
            ask = anthropic.read(body, session.earlier)
            return web.json_response({"input_tokens": session.tape.count(ask.messages, ask.tools)})
        if path not in DIALECTS:
            raise Refused(404, "not_found", f"found {path!r}; wanted {', '.join(DIALECTS)}, models or reward")
        dialect = DIALECTS[path]
        ask = dialect.read(body, session.earlier)
        asked = asyncio.ensure_future(session.ask(ask, is_gone=partial(_is_gone, request)))
        if ask.stream:
            return await _stream(request, session, dialect, ask, asked)
        turn = await asked
        answer_id = f"{session.id}-{turn.number}"
        written = dialect.answer(ask, turn, answer_id)
        response = web.json_response(written)
        await response.prepare(request)
        await response.write_eof()
        if not _is_gone(request):
            session.delivered(turn, written["id"])
        return response


def _is_gone(request: web.Request) -> bool:
    """Return whether the client of a request has dropped off."""
    return request.transport is None or request.transport.is_closing()


async def _stream(
    request: web.Request, session: Session, dialect: Dialect, ask: Ask, asked: asyncio.Future[TapeTurn]
) -> web.StreamResponse:
    """Send a turn as server-sent events. The engine gives it whole; lines that say nothing keep the connection until then."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    while not asked.done():
        await asyncio.wait({asked}, timeout=KEEP_ALIVE_S)
        if not asked.done():
            if not response.prepared:
                await response.prepare(request)
            await response.write(b": the policy is at work\n\n")
    try:
        turn = asked.result()
    except Refused as refused:
        if not response.prepared:
            raise
        session.refused(refused.kind)
        await response.write(_event("error", dialect.error(refused)))
        return response
    if not response.prepared:
        await response.prepare(request)
    answer_id = f"{session.id}-{turn.number}"
    for name, data in dialect.events(ask, turn, answer_id):
        await response.write(_event(name, data))
    await response.write_eof()
    if not _is_gone(request):
        session.delivered(turn, dialect.answer(ask, turn, answer_id)["id"])
    return response


def _event(name: str | None, data: Mapping[str, Any] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{'' if name is None else f'event: {name}\n'}data: {text}\n\n".encode()


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = parse_json((await request.read()).decode())
    except ValueError as error:
        raise Refused(400, "invalid_request", f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "invalid_request", f"found {type(body).__name__}; wanted an object")
    return body


def _take_reward(session: Session, body: Mapping[str, Any]) -> web.Response:
    """Take the reward that a program posts: `{"reward": 0.5}`."""
    value = body.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(400, "invalid_request", f"reward: found {value!r}; wanted a number")
    if session.reward is not None and session.reward != value:
        raise Refused(400, "invalid_request", f"the session has the reward {session.reward} already")
    session.reward = float(value)
    return web.json_response({"reward": session.reward})


def _refusal(session: Session | None, refused: Refused, dialect: Dialect) -> web.Response:
    if session is not None:
        session.refused(refused.kind)
        logger.info("agents: session %s: refused (%s): %s", session.id, refused.kind, refused.message)
    # Packages ask again by themselves where that may help; here it does not.
    headers = {"x-should-retry": "false"}
    return web.json_response(dialect.error(refused), status=refused.status, headers=headers)
