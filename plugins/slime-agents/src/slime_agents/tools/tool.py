"""`Tool` and `Toolset`, and answering a call: under a deadline, cut to a size, and with an error text instead of an error."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jsonschema
from slime_core.errors import DeadlineError, PluginError
from slime_core.files.json_text import why_not_text
from slime_core.runtime.deadline import within

from slime_agents.formats.calls import ToolCall

logger = logging.getLogger(__name__)
#: What a kind may take beyond the deadline of what it runs, to start and to end it on a busy machine, seconds.
SPARE_S = 25.0


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """What one call may take."""

    timeout_s: float = 30.0
    """Seconds."""
    max_chars: int = 8000
    """Characters of the result."""


class Tool(Protocol):
    """Answers calls."""

    schema: Mapping[str, Any]
    """`{"name", "description", "parameters"}`: `parameters` is a JSON Schema of an object."""
    limits: ToolLimits

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Return the result: text, or what JSON can write. What it raises is told to the model as text.

        Raises:
            PluginError: the tool is not to be had any more; this ends the run.
        """


class Toolset(Protocol):
    """Tools that share something: a server, a sandbox. Belongs to one event loop."""

    async def open(self) -> Sequence[Tool]:
        """Return the tools, and get ready for calls.

        Raises:
            PluginError: they are not to be had; says why.
        """

    async def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, kw_only=True)
class ToolAnswer:
    """What a call came to."""

    text: str
    is_error: bool = False


async def answer(tool: Tool, call: ToolCall) -> ToolAnswer:
    """Call a tool; whatever goes wrong is text for the model.

    Raises:
        PluginError: the tool is not to be had any more.
    """
    name, limits = call.name, tool.limits
    if why := wrong_arguments(tool.schema, call.arguments):
        return ToolAnswer(text=f"error: {name}: {why}", is_error=True)
    try:
        result = await within(limits.timeout_s, f"the tool {name}", _called(tool, call))
    except DeadlineError:
        return ToolAnswer(text=f"error: {name} gave no answer within {limits.timeout_s:g} s", is_error=True)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return ToolAnswer(text=f"error: {name} was cancelled", is_error=True)
    except (GeneratorExit, PluginError):
        raise
    except BaseException as error:  # the edge of the run: a tool is somebody else's program
        logger.debug("the tool %s raised", name, exc_info=True)
        return ToolAnswer(text=cut(f"error: {name}: {_told(error)}", limits.max_chars), is_error=True)
    return ToolAnswer(text=cut(_written(result), limits.max_chars))


async def _called(tool: Tool, call: ToolCall) -> Any:
    """Call a tool; one that would end the process (`sys.exit`) raises what an event loop does not heed."""
    try:
        return await tool.call(call.arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(_told(error)) from error


def wrong_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Return why arguments do not fit a tool's schema; None where they do."""
    validator = jsonschema.Draft202012Validator(schema["parameters"])
    error = next(iter(validator.iter_errors(dict(arguments))), None)
    if error is None:
        return None
    place = "".join(f"[{one!r}]" if isinstance(one, int) else f".{one}" for one in error.absolute_path)
    return cut(f"arguments{place}: {error.message}", 300)


def cut(text: str, max_chars: int) -> str:
    """Return text of at most so many characters, and a note of what is missing."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {max_chars} of {len(text)} characters]"


def _written(result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    if why_not_text(text):  # what a tokenizer cannot take
        return text.encode(errors="replace").decode()
    return text


def _told(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
