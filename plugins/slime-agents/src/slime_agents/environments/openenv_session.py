"""`OpenEnvSession`: one episode of an OpenEnv server, over its web socket or over plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp

_SHOWN_CHARACTERS = 300
#: Who asks has a deadline (`environment_timeout_s`), which may be longer than the 300 s of aiohttp's own.
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


class OpenEnvError(ConnectionError):
    """The server does not answer, fails, or says something that OpenEnv's protocol does not have."""


class BadAction(ValueError):
    """The server refuses an action as malformed: what it says is for the policy."""


class OpenEnvSession(Protocol):
    """One episode. Answers are `{"observation": object, "reward": number or null, "done": boolean}`."""

    async def reset(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin the episode; its answer has what the policy sees first."""

    async def step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take an action.

        Raises:
            BadAction: it is malformed.
            OpenEnvError: anything else went wrong.
        """

    async def close(self) -> None:
        """End the episode."""


class SocketSession:
    """An episode over `URL/ws`, which has an environment of its own on the server: any number at once.

    It always receives, also while the policy speaks: servers ping (uvicorn every 20 s), aiohttp answers only while it receives, and
    who does not answer loses the connection.

    Source: meta-pytorch/OpenEnv, src/openenv/core/env_server/http_server.py and types.py (messages reset, step, close).

    Args:
        url: of the server, http or https.
        wait_s: how long to try again while all of the server's sessions are taken.
    """

    def __init__(self, url: str, *, wait_s: float) -> None:
        self._url, self._wait_s = f"{url.rstrip('/')}/ws", wait_s
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._next: asyncio.Task[aiohttp.WSMessage] | None = None
        """Receives the server's next message."""

    async def reset(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin the episode; waits while the server has no room for it."""
        self._http = aiohttp.ClientSession(timeout=_NO_TIMEOUT, trust_env=False)
        loop, pause_s = asyncio.get_running_loop(), 0.05
        deadline = loop.time() + self._wait_s
        while True:
            try:
                self._socket = await self._http.ws_connect(self._url, max_msg_size=1 << 26)
                self._receive(self._socket)
                return await self._ask({"type": "reset", "data": dict(arguments)})
            except _NoRoom as error:
                await self._hang_up()
                if loop.time() + pause_s > deadline:
                    raise OpenEnvError(
                        f"{self._url}: no session was free within {self._wait_s:g} s ({error}); start the server with more "
                        "(max_concurrent_envs), or lower --over-sampling-batch-size and --rollout-batch-size"
                    ) from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
            except aiohttp.ClientError as error:
                raise OpenEnvError(
                    f"{self._url}: {type(error).__name__}: {error}; is the server up?"
                ) from error

    async def step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take an action."""
        return await self._ask({"type": "step", "data": dict(action)})

    async def close(self) -> None:
        """Say so, and close the connection."""
        if self._socket is not None and not self._socket.closed:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):  # it may be gone already
                await self._socket.send_str('{"type": "close"}')
        await self._hang_up()
        if self._http is not None:
            await self._http.close()

    def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._next = asyncio.create_task(socket.receive(), name=f"receiving from {self._url}")

    async def _hang_up(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._next is not None:
            self._next.cancel()

    async def _ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None
        assert self._next is not None
        try:
            await self._socket.send_str(json.dumps(message))
            reply = await self._next
            self._receive(self._socket)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise OpenEnvError(f"{self._url}: {type(error).__name__}: {error}") from error
        if reply.type is not aiohttp.WSMsgType.TEXT:
            raise OpenEnvError(
                f"{self._url}: the connection ended ({reply.type.name}) after {message['type']}"
            )
        told = _object(reply.data, self._url)
        data = told.get("data")
        if told.get("type") == "error" and isinstance(data, dict):
            code, text = data.get("code"), _short(data.get("errors") or data.get("message"))
            if code == "CAPACITY_REACHED":
                raise _NoRoom(text)
            if code == "VALIDATION_ERROR" and message["type"] == "step":
                raise BadAction(text)
            raise OpenEnvError(f"{self._url}: {message['type']} failed: {code}: {text}")
        if told.get("type") != "observation":
            raise OpenEnvError(
                f"{self._url}: answered {_short(told)} to {message['type']}; wanted an observation"
            )
        return _answer(data, self._url)


class _NoRoom(Exception):
    """All of the server's sessions are taken."""


class HttpSession:
    """An episode over `POST /reset`, `POST /step` and `GET /state`, of a server that has one environment.

    After each request the state is held against this episode's id and number of steps, so that a server whose environment several
    conversations share, or which makes a new one for each request, is an error and not silently wrong.

    Args:
        url: of the server.
        episode_id: told at reset.
    """

    def __init__(self, url: str, *, episode_id: str) -> None:
        self._url, self._id, self._steps = url.rstrip("/"), episode_id, 0
        self._http: aiohttp.ClientSession | None = None

    async def reset(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin the episode."""
        self._http = aiohttp.ClientSession(timeout=_NO_TIMEOUT, trust_env=False)
        answer = await self._ask("POST", "/reset", {"episode_id": self._id, **arguments})
        await self._check_state()
        return _answer(answer, self._url)

    async def step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take an action."""
        answer = await self._ask("POST", "/step", {"action": dict(action)})
        self._steps += 1
        await self._check_state()
        return _answer(answer, self._url)

    async def close(self) -> None:
        """Close the connection."""
        if self._http is not None:
            await self._http.close()

    async def _check_state(self) -> None:
        state = await self._ask("GET", "/state", None)
        found = state.get("episode_id"), state.get("step_count")
        if found != (self._id, self._steps):
            raise OpenEnvError(
                f"{self._url}/state: found episode {found[0]!r} after {found[1]!r} steps; wanted {self._id!r} after {self._steps}: "
                "the server has one environment for all conversations, or a new one for each request; take its sessions "
                '(transport = "socket"), or one conversation at a time'
            )

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        assert self._http is not None
        try:
            async with self._http.request(method, self._url + path, json=body) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise OpenEnvError(
                f"{self._url}{path}: {type(error).__name__}: {error}; is the server up?"
            ) from error
        if reply.status == 422 and path == "/step":
            raise BadAction(_short(_object(text, self._url).get("detail")))
        if reply.status != 200:
            raise OpenEnvError(f"{self._url}{path}: status {reply.status}, {_short(text)}")
        return _object(text, self._url)


def _object(text: str, url: str) -> Mapping[str, Any]:
    """Return a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OpenEnvError(f"{url}: answered {_short(text)}; wanted JSON") from error
    if not isinstance(found, dict):
        raise OpenEnvError(f"{url}: answered {_short(found)}; wanted a JSON object")
    return found


def _answer(data: Any, url: str) -> Mapping[str, Any]:
    """Return an answer whose fields have their types."""
    if isinstance(data, dict) and isinstance(data.get("observation"), dict):
        reward, done = data.get("reward"), data.get("done", False)
        is_number = isinstance(reward, int | float)  # a boolean is 0 or 1, as in OpenEnv
        if (reward is None or is_number) and isinstance(done, bool):
            return {"observation": data["observation"], "reward": reward, "done": done}
    raise OpenEnvError(
        f'{url}: answered {_short(data)}; wanted {{"observation": object, "reward": number or null, "done": boolean}}'
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
