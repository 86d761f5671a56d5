"""Arguments that are written without their types: which type each has, by the schemas of the tools.

GLM's and Qwen3-Coder's templates write text as it is, so `2024` may be a number or text. Source: the parsers of their calls in SGLang and
vLLM, which ask the schema, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_core.files.json_text import parse_json

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
#: What templates in Python write where JSON has `true`, `false` and `null`.
_WORDS = {"true": True, "false": False, "none": None}


def typed(
    calls: Sequence[ToolCall | Malformed], tools: Sequence[Mapping[str, Any]]
) -> tuple[ToolCall | Malformed, ...]:
    """Return calls whose arguments have the types of the tools' schemas, where the text that was written reads as such.

    One that may be text or another type has the other one if it reads as that. Where a schema names no type, and where the text reads as
    none of its types, an argument stays as its format has read it.

    Args:
        calls: as a format read them.
        tools: as OpenAI's Chat Completions has them. What of them is no schema says nothing.
    """
    return tuple(
        _typed(call, tools) if isinstance(call, ToolCall) and call.written else call for call in calls
    )


def _typed(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    schema = _parameters(call.name, tools)
    properties = _mapping(schema.get("properties"))
    values = {
        name: _value(call.arguments[name], written, _types(properties.get(name), schema))
        for name, written in call.written.items()
    }
    return replace(call, arguments={**call.arguments, **values})


def _parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    for tool in tools:
        function = _mapping(_mapping(tool).get("function"))
        if function.get("name") == name:
            return _mapping(function.get("parameters"))
    return {}


def _value(read: Any, written: str, types: set[str]) -> Any:
    """Return the value that text is where a schema takes some types; as it was read where it is of none of them.

    Args:
        read: what the format made of the text; the text itself where it leaves that to the schema.
        written: the text.
        types: of the schema; none where it says nothing.
    """
    found = read
    if types and read == written:
        found = _parsed(written, words=_TEXT not in types)
    if not types.isdisjoint(_NAMES.get(type(found), ())):
        return found
    return written if _TEXT in types else read


def _parsed(written: str, *, words: bool) -> Any:
    """Return the number, list, object, truth or null that text is; the text itself where it is none, and where it is a string of JSON."""
    text = written.strip()
    if words and text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = parse_json(text)
    except ValueError:
        return written
    return written if isinstance(value, str) else value


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema takes; none where it says nothing of them.

    Args:
        schema: of an argument.
        root: which it stands in, and which references lead through: each is followed once.
    """
    types, followed = set[str](), set[str]()
    left = [(schema, False)]
    while left:
        given, is_option = left.pop()
        one = _mapping(given)
        below = [(part, is_option) for part in _list(one.get("allOf"))]
        below += [(part, True) for name in ("anyOf", "oneOf") for part in _list(one.get(name))]
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            below.append((_referred(reference, root), is_option))
        named = _named(one)
        if is_option and not (named or below or reference):
            named = _ALL  # of several, one that says nothing takes all
        types |= named
        left += below
    return types


def _named(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names by itself."""
    named = schema.get("type")
    if named is not None:
        return {one for one in [named, *_list(named)] if isinstance(one, str)}
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
    return {name for value in values for name in _NAMES.get(type(value), ())}


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference such as `#/$defs/Place` leads to; None where there is none within `root`."""
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for key in reference[2:].split("/"):
        found = _mapping(found).get(key.replace("~1", "/").replace("~0", "~"))
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
