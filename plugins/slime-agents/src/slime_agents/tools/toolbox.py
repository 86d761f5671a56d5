"""`Toolbox`: all tools of a run, by the settings that name them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config.functions import Resolve
from slime_core.errors import ConfigError, PluginError, Problem, SlimeError

from slime_agents.formats.calls import Malformed, ToolCall
from slime_agents.tools.tool import Tool, ToolAnswer, ToolLimits, Toolset, answer


class Toolbox:
    """The tools of a run. Opened by the first session that wants them, and closed with the run.

    Args:
        toolsets: name in the settings -> toolset.
        max_calls: of one turn that are answered.
    """

    def __init__(self, toolsets: Mapping[str, Toolset], *, max_calls: int) -> None:
        self._toolsets, self._max_calls = dict(toolsets), max_calls
        self._opening: asyncio.Task[None] | None = None
        self._tools: dict[str, Tool] = {}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The open tools, as chat templates read them."""
        return [{"type": "function", "function": dict(tool.schema)} for tool in self._tools.values()]

    async def open(self) -> None:
        """Open all toolsets, once.

        Raises:
            PluginError: one is not to be had, or two have a tool of one name.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name="tools")
        await asyncio.shield(self._opening)

    async def answer(self, calls: Sequence[ToolCall | Malformed]) -> list[ToolAnswer]:
        """Answer the calls of one turn, all at once, in their order."""
        return list(await asyncio.gather(*(self._answer(i, call) for i, call in enumerate(calls))))

    async def close(self) -> None:
        """Close all toolsets; one that fails keeps no other open."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        async with contextlib.AsyncExitStack() as stack:
            for toolset in self._toolsets.values():
                stack.push_async_callback(toolset.close)

    async def _open(self) -> None:
        for name, toolset in self._toolsets.items():
            for tool in await toolset.open():
                own = tool.schema["name"]
                if own in self._tools:
                    raise PluginError(
                        f"agents.tools.{name}: there is another tool {own!r}; leave one of them out"
                    )
                self._tools[own] = tool

    async def _answer(self, i: int, call: ToolCall | Malformed) -> ToolAnswer:
        if i >= self._max_calls:
            told = f"error: not called: a turn may have {self._max_calls} calls"
            return ToolAnswer(text=told, is_error=True)
        if isinstance(call, Malformed):
            return ToolAnswer(text=f"error: {call.why}", is_error=True)
        tool = self._tools.get(call.name)
        if tool is None:
            told = f"error: there is no tool {call.name!r}; there are {', '.join(self._tools) or 'none'}"
            return ToolAnswer(text=told, is_error=True)
        return await answer(tool, call)


def build_toolbox(
    tools: Mapping[str, Mapping[str, Any]], resolve: Resolve, *, limits: ToolLimits, max_calls: int
) -> Toolbox:
    """Return the toolbox of the setting `agents.tools`.

    Raises:
        ConfigError: carries a problem for each tool that cannot be built.
    """
    toolsets: dict[str, Toolset] = {}
    problems: list[Problem] = []
    for name, table in tools.items():
        try:
            toolsets[name] = _toolset(name, table, resolve, limits)
        except ConfigError as error:
            problems += error.problems
        except SlimeError as error:
            problems.append(Problem(f"agents.tools.{name}", "a tool that cannot be built", str(error)))
    if problems:
        raise ConfigError(problems)
    return Toolbox(toolsets, max_calls=max_calls)


def _toolset(name: str, table: Mapping[str, Any], resolve: Resolve, limits: ToolLimits) -> Toolset:
    where, options = f"agents.tools.{name}", dict(table)
    kind = options.pop("kind", None)
    if not isinstance(kind, str):
        raise PluginError(f"{where}: found no kind; wanted kind = NAME, such as python, http, mcp or code")
    timeout_s = options.pop("timeout_s", limits.timeout_s)
    max_chars = options.pop("max_chars", limits.max_chars)
    for key, value, whole in (("timeout_s", timeout_s, False), ("max_chars", max_chars, True)):
        is_number = (
            isinstance(value, int if whole else int | float) and not isinstance(value, bool) and value > 0
        )
        if not is_number:
            raise PluginError(f"{where}.{key}: found {value!r}; wanted a number above 0")
    own = ToolLimits(timeout_s=float(timeout_s), max_chars=int(max_chars))
    create = resolve("slime.tools", kind, where=where, explicit=options)
    try:
        made: Toolset = create(name, own)
    except (TypeError, AttributeError) as error:  # an option of another type than the kind wants
        raise PluginError(f"{where}: {type(error).__name__}: {error}") from error
    return made
