"""Calls as XML, as GLM-4.5 writes them: the name, then a pair of tags for each argument's key and value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.files.json_text import parse_json

from slime_agents.formats.calls import Malformed, Spoken, ToolCall, cut_out, described

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAME = re.compile(r"\s*([^\s<>]+)\s*(?=<arg_key>|\Z)")


class Glm:
    """The format `xml`. A value that is JSON is that value, unless its tool takes text there; any other is text, over as many lines as it has."""

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that tells a model of its tools."""
        return (
            "You may call these tools, each given as JSON:\n"
            f"<tools>\n{described(tools)}\n</tools>\n"
            "To call one, write:\n"
            "<tool_call>NAME\n<arg_key>ARGUMENT</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
        )

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        return "\n".join(f"<tool_call>{call.name}{_pairs(call.arguments)}\n</tool_call>" for call in calls)

    def read(self, text: str) -> Spoken:
        """Return what a turn says and calls."""
        content, bodies = cut_out(text, _CALL)
        return Spoken(content.strip() if bodies else text, tuple(map(_read, bodies)))


def _pairs(arguments: Mapping[str, Any]) -> str:
    return "".join(
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>"
        for key, value in arguments.items()
    )


def _text(value: Any) -> str:
    """Write a value so that `_value` reads the same one: text that would read as JSON is written as JSON."""
    if isinstance(value, str) and _value(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _value(text: str) -> Any:
    try:
        return parse_json(text.strip())
    except ValueError:
        return text


def _read(body: str) -> ToolCall | Malformed:
    named = _NAME.match(body)
    if named is None:
        return Malformed(body, "found no name of a tool after <tool_call>")
    arguments: dict[str, Any] = {}
    written: dict[str, str] = {}
    end = named.end()
    while pair := _PAIR.match(body, end):
        key = pair[1].strip()
        if key in arguments:
            return Malformed(body, f"{named[1]} is given {key!r} twice")
        arguments[key], written[key], end = _value(pair[2]), pair[2], pair.end()
    if rest := body[end:].strip():
        return Malformed(
            body,
            f"after {named[1]} comes {rest[:60]!r}; wanted pairs of <arg_key> and <arg_value>, each closed",
        )
    return ToolCall(named[1], arguments, written)
