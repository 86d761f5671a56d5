"""Calls as XML of functions and parameters, as Qwen3-Coder and Qwen3.5 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime_agents.formats.calls import Malformed, Spoken, ToolCall, cut_out, described

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^\s<>]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^\s<>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_END = re.compile(r"\s*</function>\s*\Z")


class Qwen3Coder:
    """The format `qwen3_coder`. A value is text as it stands, over as many lines as it has, unless the tool's schema has another type.

    Source: Qwen3-Coder's chat template, and the parsers of SGLang and vLLM. They also take calls without `<tool_call>`, and those whose
    tags are not closed; here the model is told.
    """

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that tells a model of its tools."""
        return (
            "You may call these tools, each given as JSON:\n"
            f"<tools>\n{described(tools)}\n</tools>\n"
            "To call one, write:\n"
            "<tool_call>\n<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n</tool_call>"
        )

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them: text as it is, other values as JSON."""
        return "\n".join(
            f"<tool_call>\n<function={call.name}>\n{_parameters(call.arguments)}</function>\n</tool_call>"
            for call in calls
        )

    def read(self, text: str) -> Spoken:
        """Return what a turn says and calls. All arguments are text: their types are those of the tool's schema (`formats.untyped`)."""
        content, bodies = cut_out(text, _CALL)
        return Spoken(content.strip() if bodies else text, tuple(map(_read, bodies)))


def _parameters(arguments: Mapping[str, Any]) -> str:
    return "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n</parameter>\n"
        for key, value in arguments.items()
    )


def _read(body: str) -> ToolCall | Malformed:
    named = _FUNCTION.match(body)
    if named is None:
        return Malformed(body, "found no <function=NAME> after <tool_call>")
    written: dict[str, str] = {}
    end = named.end()
    while parameter := _PARAMETER.match(body, end):
        key, value = parameter.groups()
        if key in written:
            return Malformed(body, f"{named[1]} is given {key!r} twice")
        written[key], end = value, parameter.end()
    if _END.match(body, end) is None:
        rest = body[end:].strip()[:60]
        return Malformed(
            body,
            f"after {named[1]} and its {len(written)} parameters comes {rest!r}; wanted pairs of <parameter=ARGUMENT> and "
            "</parameter>, and </function> at the end",
        )
    return ToolCall(named[1], dict(written), written)
