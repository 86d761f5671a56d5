"""The tool kind `mcp`: the tools of a server of the Model Context Protocol, by the official package (extra `mcp`)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from slime_core.errors import PluginError
from slime_core.runtime.clock import now
from slime_core.runtime.deadline import within

from slime_agents.tools.schema import checked
from slime_agents.tools.tool import Tool, ToolLimits

logger = logging.getLogger(__name__)
#: Seconds that a server has to start and list its tools, and to end.
START_S, END_S = 60.0, 10.0
#: Seconds between attempts to reach a server again.
AGAIN_S = 1.0


class McpTool:
    """One tool of a server."""

    def __init__(self, server: McpTools, schema: Mapping[str, Any], limits: ToolLimits) -> None:
        self._server, self.schema, self.limits = server, schema, limits

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of the result; raises what the server says is wrong.

        Raises:
            PluginError: the server was lost, and is not to be had again.
        """
        client = await self._server.connected()
        try:
            result = await client.call_tool(self.schema["name"], dict(arguments))
        except Exception as error:
            await self._server.look_after(client, error)
            raise
        text = "\n".join(
            part.text if part.type == "text" else f"[{part.type}, which is not shown]"
            for part in result.content
        )
        if result.is_error:
            raise RuntimeError(text)
        return text


class McpTools:
    """The tools of one server, which is started, or connected to, once for all sessions, and again where it was lost.

    Args:
        name: of the server.
        limits: of a call.
        connect: returns the client, an asynchronous context manager.
        only: names of the tools that are offered; None for all.
        patience_s: for which it is tried to connect again, seconds; one attempt where 0.
    """

    def __init__(
        self,
        name: str,
        limits: ToolLimits,
        *,
        connect: Callable[[], Any],
        only: Sequence[str] | None,
        patience_s: float = 0.0,
    ) -> None:
        self._name, self._limits, self._connect, self._only = name, limits, connect, only
        self._patience_s = patience_s
        self._client: Any = None
        self._again: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._done = asyncio.Event()

    async def open(self) -> Sequence[Tool]:
        """Connect, and return the server's tools."""
        return await self._start()

    async def connected(self) -> Any:
        """Return the client, once the server is there.

        Raises:
            PluginError: it was lost, and is not to be had again.
        """
        if self._again is not None:
            await asyncio.shield(self._again)
        return self._client

    async def look_after(self, client: Any, error: Exception) -> None:
        """Start the server again if it is lost: once, however many calls find it so.

        Args:
            client: that a call has failed by.
            error: how.

        Raises:
            PluginError: it is not to be had again.
            RuntimeError: it was lost, and is there again. The call is not made twice: it may have had its effect.
        """
        if client is self._client and await _answers(client):
            return
        if client is self._client:  # still: nobody else has found it lost meanwhile
            told = f"{type(error).__name__}: {error}"
            logger.warning("agents: the MCP server %r is lost (%s); it is started again", self._name, told)
            self._client = None
            # Of no context: it is not a part of the call, whose deadline may end that before.
            self._again = asyncio.create_task(
                self._restart(), name=f"mcp {self._name} again", context=contextvars.Context()
            )
        await self.connected()
        told = f"the MCP server {self._name!r} was lost before it answered; it is there again"
        raise RuntimeError(told) from error

    async def close(self) -> None:
        """Disconnect, and end the server if it was started."""
        if self._again is not None:
            self._again.cancel()
            await asyncio.wait({self._again})
        await self._stop()

    async def _restart(self) -> None:
        begin = now()
        while True:
            await self._stop()
            try:
                await self._start()
                return
            except PluginError as error:
                if now() - begin >= self._patience_s:
                    raise PluginError(
                        f"the MCP server {self._name!r} was lost, and is not to be had again; see why it ended, and "
                        f"resume the run ({error})"
                    ) from error
            await asyncio.sleep(AGAIN_S)

    async def _start(self) -> list[Tool]:
        ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        # A task of its own: the connection is to be closed by the one that opened it.
        self._task = asyncio.create_task(self._serve(ready, self._done), name=f"mcp {self._name}")
        try:
            return await within(START_S, f"the MCP server {self._name}", ready, waits_for_others=True)
        except PluginError:
            raise
        except Exception as error:
            told = f"the MCP server {self._name!r}: {type(error).__name__}: {error}"
            raise PluginError(told) from error

    async def _stop(self) -> None:
        self._done.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=END_S)
            self._task.cancel()

    async def _serve(self, ready: asyncio.Future[list[Tool]], done: asyncio.Event) -> None:
        try:
            async with self._connect() as client:
                try:
                    tools = await self._listed(client)
                    self._client = client
                    ready.set_result(tools)
                except PluginError as error:  # here: on its way out it would become a group of errors
                    ready.set_exception(error)
                await done.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            with contextlib.suppress(asyncio.InvalidStateError):
                ready.cancel()

    async def _listed(self, client: Any) -> list[Tool]:
        found: list[Any] = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        names = {tool.name for tool in found}
        if self._only is not None and (missing := set(self._only) - names):
            raise PluginError(
                f"the MCP server {self._name!r} has no tools {sorted(missing)}; it has {sorted(names)}"
            )
        wanted = [tool for tool in found if self._only is None or tool.name in self._only]
        schemas = [
            checked(
                {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            )
            for tool in wanted
        ]
        self._only = [tool.name for tool in wanted]  # which a server that is started again is to have, too
        return [McpTool(self, schema, self._limits) for schema in schemas]


async def _answers(client: Any) -> bool:
    """Return whether a server still answers: what failed was a call alone then."""
    try:
        await client.list_tools(cache_mode="bypass")
    except Exception:
        return False
    return True


def mcp(
    name: str,
    limits: ToolLimits,
    *,
    command: list[str] | None = None,
    url: str | None = None,
    only: list[str] | None = None,
) -> McpTools:
    """Return the tools of an MCP server: one that is started as a child, or one that is there already.

    Args:
        name: of the server; its tools have the names that it gives them.
        limits: of a call.
        command: command line of a server that speaks over its standard input and output.
        url: of a server over HTTP.
        only: names of the tools that are offered; all when not given.

    Raises:
        PluginError: not one of `command` and `url` is given, or the package `mcp` is not installed.
    """
    if (command is None) == (url is None):
        raise PluginError(
            f"the tool {name!r}: found {'neither' if command is None else 'both'}; wanted command or url"
        )
    if find_spec("mcp") is None:
        raise PluginError(f"the tool {name!r}: the package mcp is not installed; install slime-agents[mcp]")

    def connect() -> Any:
        from mcp import Client, StdioServerParameters

        if command is None:
            return Client(str(url))
        return Client(StdioServerParameters(command=command[0], args=command[1:]))

    # Whoever runs a server that others connect to starts it again; one of our own has one attempt.
    patience_s = 0.0 if url is None else START_S
    return McpTools(name, limits, connect=connect, only=only, patience_s=patience_s)
