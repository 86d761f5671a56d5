"""Calls as Llama 3 writes them: the whole turn is JSON with `name` and `parameters`, after `<|python_tag|>` or not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.files.json_text import parse_json

from slime_agents.formats.calls import Malformed, Spoken, ToolCall, call_of, described

_TAG = "<|python_tag|>"
#: How a turn that is a call begins; anything else is text.
_BEGIN = re.compile(r'\s*[\[{]\s*(?:\{\s*)?"(?:name|type|function|parameters|arguments)"')
_BETWEEN = re.compile(r"[\s;,]*")


class Llama:
    """The format `llama`. Several calls stand one after the other, between semicolons, or in a list."""

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that tells a model of its tools."""
        return (
            f"You may call these functions, each given as JSON:\n{described(tools)}\n"
            'To call one, answer with JSON alone: {"name": "NAME", "parameters": {"ARGUMENT": "VALUE"}}'
        )

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them."""
        return "; ".join(
            json.dumps({"name": call.name, "parameters": dict(call.arguments)}, ensure_ascii=False)
            for call in calls
        )

    def read(self, text: str) -> Spoken:
        """Return what a turn says and calls."""
        before, tag, body = text.partition(_TAG)
        if not tag:
            before, body = "", text
        if not tag and not _BEGIN.match(body):
            return Spoken(text)
        try:
            values = _values(body)
        except (ValueError, RecursionError) as error:
            return Spoken(before.strip(), (Malformed(body, f"the call is no JSON ({error})"),))
        calls = tuple(call_of(value, body, arguments=("parameters", "arguments")) for value in values)
        return Spoken(before.strip(), calls)


def _values(body: str) -> list[Any]:
    """Return the JSON values that stand one after the other.

    Raises:
        ValueError: something between them is none.
    """
    found: list[Any] = []
    decoder = json.JSONDecoder()
    at = _BETWEEN.match(body).end()  # type: ignore[union-attr]  # it matches nothing, too
    while at < len(body):
        _, end = decoder.raw_decode(body, at)
        value = parse_json(body[at:end])  # which refuses what is no strict JSON
        found += value if isinstance(value, list) else [value]
        at = _BETWEEN.match(body, end).end()  # type: ignore[union-attr]  # as above
    if not found:
        raise ValueError("it is empty")
    return found
