"""The tool kind `code`: runs the Python programs that the model writes, in the sandbox of slime-rm."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_core.runtime.daemon_thread import DaemonThread
from slime_rm.code.sandbox.running import Limits as Bounds
from slime_rm.code.sandbox.running import run

from slime_agents.tools.schema import checked
from slime_agents.tools.tool import SPARE_S, Tool, ToolLimits

_DESCRIPTION = "Runs a Python program, without network or files, and returns what it prints."
_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "the program"}},
    "required": ["code"],
    "additionalProperties": False,
}


class CodeTool:
    """Runs programs in Linux namespaces of their own, each under limits of time, memory, processes and output.

    A program has the seconds of `limits` from when it runs; the call has a few more.
    """

    def __init__(self, schema: Mapping[str, Any], limits: ToolLimits, *, memory_mb: int) -> None:
        self.schema, self.limits = schema, replace(limits, timeout_s=limits.timeout_s + SPARE_S)
        self._seconds, self._memory_bytes = limits.timeout_s, memory_mb << 20

    async def open(self) -> Sequence[Tool]:
        """Return the tool."""
        return [self]

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return what the program prints, and how it ended if not by itself."""
        bounds = Bounds(
            wall_s=self._seconds, cpu_s=math.ceil(self._seconds) + 1, memory_bytes=self._memory_bytes
        )
        thread = DaemonThread("sandbox")
        running = thread.submit(run, {"main.py": arguments["code"]}, "main.py", limits=bounds)
        thread.shutdown(wait=False)
        ran = await asyncio.wrap_future(running)
        told = {
            "time": f"stopped after {self._seconds:g} s",
            "memory": "stopped for its memory",
            "output": "stopped for its output",
        }
        ending = told.get(ran.ending) or (f"ended by {ran.ending} {ran.code}" if ran.code else "")
        return "\n".join(part for part in (ran.stdout.rstrip("\n"), ran.stderr.rstrip("\n"), ending) if part)

    async def close(self) -> None:
        """Nothing to do."""


def code(name: str, limits: ToolLimits, *, description: str = _DESCRIPTION, memory_mb: int = 512) -> CodeTool:
    """Return a tool that runs Python programs where they can reach nothing.

    Args:
        name: of the tool.
        limits: of a program, and of its call.
        description: what the model reads.
        memory_mb: of one program, megabytes.
    """
    schema = checked({"name": name, "description": description, "parameters": _PARAMETERS})
    return CodeTool(schema, limits, memory_mb=memory_mb)
