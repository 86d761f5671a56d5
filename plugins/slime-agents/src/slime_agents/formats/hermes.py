"""Calls as JSON between `<tool_call>` tags, as Hermes, Qwen and many others write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.files.json_text import parse_json

from slime_agents.formats.calls import Malformed, Spoken, ToolCall, call_of, cut_out, described

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
#: The end of the text closes the last one: a stop string may have been taken off.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class Hermes:
    """The format `json`."""

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that tells a model of its tools."""
        return (
            "You may call these tools, each given as JSON:\n"
            f"<tools>\n{described(tools)}\n</tools>\n"
            "To call one, write its name and arguments as JSON between tags, once for each call:\n"
            '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
        )

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        written = (
            json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
            for call in calls
        )
        return "\n".join(f"{_OPEN}\n{one}\n{_CLOSE}" for one in written)

    def read(self, text: str) -> Spoken:
        """Return what a turn says and calls."""
        content, bodies = cut_out(text, _CALL)
        return Spoken(content.strip() if bodies else text, tuple(map(_read, bodies)))


def _read(body: str) -> ToolCall | Malformed:
    try:
        return call_of(parse_json(body.strip()), body)
    except ValueError as error:
        return Malformed(body, f"what is between {_OPEN} and {_CLOSE} is no JSON ({error})")
