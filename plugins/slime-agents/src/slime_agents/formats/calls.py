"""What all tool formats share: a call, a call that cannot be read, and the turn that they are read from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_core.files.json_text import parse_json, shown


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]
    written: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Text of those arguments whose form does not tell text from other values; see `formats.untyped`."""


@dataclass(frozen=True)
class Malformed:
    """Text that was meant as a call and is none."""

    text: str
    why: str
    """What was found, and what was wanted: it is what the model is told."""


@dataclass(frozen=True)
class Spoken:
    """A turn of the policy, read."""

    content: str
    """What it says beside its calls."""
    calls: tuple[ToolCall | Malformed, ...] = field(default=())
    """In the order in which they are written."""


class ToolFormat(Protocol):
    """A way to write tool calls. Entry points of the group `slime.tool_formats` are objects of this kind."""

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that tells a model of its tools, for chat templates that do not.

        Args:
            tools: as OpenAI's Chat Completions has them: `{"type": "function", "function": {name, description, parameters}}`.
        """

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""

    def read(self, text: str) -> Spoken:
        """Return what a turn says and calls. Never raises: what cannot be read is `Malformed`."""


def call_of(value: Any, text: str, *, arguments: Sequence[str] = ("arguments",)) -> ToolCall | Malformed:
    """Return the call that a JSON value is.

    Args:
        value: what was parsed.
        text: that it was parsed from.
        arguments: keys under which arguments may stand; the first is what a message names.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Malformed(text, f"found {shown(value)}; wanted an object with name and {arguments[0]}")
    given: Any = next((value[key] for key in arguments if key in value), {})
    if isinstance(given, str):  # some models write them as text
        try:
            given = parse_json(given)
        except ValueError:
            return Malformed(
                text, f"{arguments[0]} of {value['name']} is text that is no JSON; wanted an object"
            )
    if not isinstance(given, dict):
        return Malformed(text, f"{arguments[0]} of {value['name']} is {shown(given)}; wanted an object")
    return ToolCall(value["name"], given)


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return tools as a line of JSON each."""
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def cut_out(text: str, pattern: re.Pattern[str]) -> tuple[str, list[str]]:
    """Return the text without what a pattern matches, and the first group of each match."""
    return pattern.sub("", text), [match[1] for match in pattern.finditer(text)]
