"""Arguments that are written without their types: which of them are text, by the schemas of the tools.

GLM's templates write text as it is, so `2024` may be a number or text. Source: the parsers of GLM's calls in SGLang and vLLM, which
ask the schema, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_agents.formats.calls import Malformed, ToolCall

_TEXT = "string"
#: Types of Python's JSON values -> JSON Schema's; a whole number is a `number`, too.
_NAMES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: (_TEXT,),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_ALL = {name for names in _NAMES.values() for name in names}


def with_text(
    calls: Sequence[ToolCall | Malformed], tools: Sequence[Mapping[str, Any]]
) -> tuple[ToolCall | Malformed, ...]:
    """Return calls whose arguments are the text that was written, where it reads as a value that the tool's schema has text for.

    Args:
        calls: as a format read them.
        tools: as OpenAI's Chat Completions has them. What of them is no schema says nothing.
    """
    return tuple(
        _with_text(call, tools) if isinstance(call, ToolCall) and call.written else call for call in calls
    )


def _with_text(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    properties = _properties(call.name, tools)
    text = {
        name: written
        for name, written in call.written.items()
        if _wants_text(properties.get(name), call.arguments.get(name))
    }
    return replace(call, arguments={**call.arguments, **text}) if text else call


def _properties(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    for tool in tools:
        function = _mapping(tool).get("function")
        if _mapping(function).get("name") == name:
            return _mapping(_mapping(_mapping(function).get("parameters")).get("properties"))
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _wants_text(schema: Any, value: Any) -> bool:
    """Return whether a schema takes text, and nothing of the type that a value has."""
    schema = _mapping(schema)
    types = _types(schema)
    for option in _options(schema):
        types |= _types(option) or _ALL
    return _TEXT in types and types.isdisjoint(_NAMES.get(type(value), ()))


def _options(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = [one for name in ("anyOf", "oneOf") for one in _list(schema.get(name))]
    return [_mapping(one) for one in found]


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names by itself."""
    named = schema.get("type")
    if named is not None:
        return {one for one in [named, *_list(named)] if isinstance(one, str)}
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
    return {name for value in values for name in _NAMES.get(type(value), ())}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
