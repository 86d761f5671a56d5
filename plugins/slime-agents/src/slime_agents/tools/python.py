"""The tool kind `python`: a function of the user's own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.importing import IMPORT_FAILURES, import_object
from slime_core.runtime.daemon_thread import DaemonThread

from slime_agents.tools.schema import model_of, schema_of
from slime_agents.tools.tool import Tool, ToolLimits

#: Calls of one function that missed their deadlines and go on in their threads, after which it is not called any more.
MAX_HUNG = 16


class PythonTool:
    """A function as a tool. One that is not async runs in a thread of its own, which is left behind if it hangs.

    Args:
        name: of the tool.
        function: with annotated parameters; its docstring is what the model reads.
        limits: of a call.
    """

    def __init__(self, name: str, function: Callable[..., Any], limits: ToolLimits) -> None:
        self._function, self._model = function, model_of(name, function)
        self.schema: Mapping[str, Any] = schema_of(name, function, self._model)
        self.limits = limits
        self._hung = 0

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function."""
        read = self._model.model_validate(dict(arguments))
        given = {name: getattr(read, name) for name in type(read).model_fields}
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**given)
        if self._hung >= MAX_HUNG:
            raise RuntimeError(f"{self._hung} earlier calls still hang")
        thread = DaemonThread(f"tool {self.schema['name']}")
        running = thread.submit(lambda: self._function(**given))
        thread.shutdown(wait=False)
        try:
            result = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if running.running():
                self._hung += 1
                running.add_done_callback(lambda _: self._ended())
            raise
        return await result if inspect.isawaitable(result) else result

    def _ended(self) -> None:
        self._hung -= 1


class PythonTools:
    """A toolset of one function."""

    def __init__(self, tool: PythonTool) -> None:
        self._tool = tool

    async def open(self) -> Sequence[Tool]:
        """Return the tool."""
        return [self._tool]

    async def close(self) -> None:
        """Nothing to do."""


def python(name: str, limits: ToolLimits, *, function: str) -> PythonTools:
    """Return a tool that calls a Python function: its annotations are the schema, its docstring the description.

    Args:
        name: of the tool.
        limits: of a call.
        function: `module:function`, sync or async; what it returns is text, or is written as JSON.

    Raises:
        PluginError: it does not import, or its arguments have no schema.
    """
    try:
        found = import_object(function)
    except IMPORT_FAILURES as error:
        told = f"{function} does not import: {type(error).__name__}: {error}"
        raise PluginError(f"the tool {name!r}: {told}") from error
    if not callable(found):
        raise PluginError(f"the tool {name!r}: {function} is {type(found).__name__}; wanted a function")
    return PythonTools(PythonTool(name, found, limits))
