"""The tool kind `http`: a service that takes the arguments as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from slime_agents.tools.schema import checked
from slime_agents.tools.tool import Tool, ToolLimits, cut


class HttpTool:
    """Posts the arguments, and returns the body of the answer."""

    def __init__(
        self, schema: Mapping[str, Any], limits: ToolLimits, *, url: str, headers: Mapping[str, str]
    ) -> None:
        self.schema, self.limits = schema, limits
        self._url, self._headers = url, dict(headers)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> Sequence[Tool]:
        """Return the tool."""
        # No bounds of aiohttp's own: of its 100 connections, for which a call would wait until its deadline, and of 300 s, which
        # may be less than that.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )
        return [self]

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Post the arguments; raises what the model is told where the service answers with an error."""
        assert self._session is not None
        async with self._session.post(self._url, json=dict(arguments), headers=self._headers) as response:
            # A character has at most four bytes, and what is longer is cut.
            body = await response.content.read(4 * self.limits.max_chars + 4)
            while len(body) <= 4 * self.limits.max_chars and (more := await response.content.read(65536)):
                body += more
            text = body.decode(errors="replace")
            if response.status >= 400:
                raise RuntimeError(f"the service answered {response.status}: {cut(text, 500)}")
            return text

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def http(
    name: str,
    limits: ToolLimits,
    *,
    url: str,
    parameters: dict[str, Any],
    description: str = "",
    headers: dict[str, str] | None = None,
) -> HttpTool:
    """Return a tool that posts its arguments as JSON to a URL and gives the body of the answer to the model.

    Args:
        name: of the tool.
        limits: of a call.
        url: of the service.
        parameters: JSON Schema of the arguments.
        description: what the model reads.
        headers: sent with each request.

    Raises:
        PluginError: the schema is wrong.
    """
    schema = checked({"name": name, "description": description, "parameters": parameters})
    return HttpTool(schema, limits, url=url, headers=headers or {})
