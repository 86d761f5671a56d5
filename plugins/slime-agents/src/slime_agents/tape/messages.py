"""Chat messages in one form, whoever sent them, and whether a client's copy of a message is the one that it was given.

The form is that of OpenAI's Chat Completions with arguments as objects, which is what chat templates read: `role`, `content` (text),
and where there are any `reasoning_content`, `tool_calls` (each `{"id", "type": "function", "function": {"name", "arguments"}}`),
`tool_call_id` and `name`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import DataError
from slime_core.files.json_text import parse_json

Message = dict[str, Any]
#: Roles that a message may have, and what stands for others' names of them.
ROLES = ("system", "user", "assistant", "tool")
_SAME_ROLE = {"developer": "system", "function": "tool"}
#: Types of content parts that are text.
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def normal(message: Mapping[str, Any], where: str = "message") -> Message:
    """Return a message in the form of this module.

    Args:
        message: of OpenAI's Chat Completions.
        where: how errors call it.

    Raises:
        DataError: it has an unknown role, content that is no text, or tool calls that are no calls.
    """
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: found {type(message).__name__}; wanted an object with role and content")
    role = message.get("role")
    role = _SAME_ROLE.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise DataError(f"{where}: found the role {role!r}; wanted one of {', '.join(ROLES)}")
    made: Message = {"role": role, "content": text_of(message.get("content"), where)}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        made["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if role == "assistant" and calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise DataError(f"{where}: tool_calls is {type(calls).__name__}; wanted a list")
        made["tool_calls"] = [_call(call, f"{where}: tool_calls[{i}]") for i, call in enumerate(calls)]
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str):
            made[key] = message[key]
    return made


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content: text, text parts, or none.

    Raises:
        DataError: a part is no text, such as an image; it is named.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise DataError(f"{where}: content is {type(content).__name__}; wanted text, or a list of text parts")
    return "".join(_part(part, f"{where}: content[{i}]") for i, part in enumerate(content))


def same(ours: Message, theirs: Message) -> bool:
    """Return whether a client's copy of a message is the one that we know.

    Clients keep neither ids of calls, nor how arguments were written, nor blanks at the ends of a text, nor, most of them, the
    reasoning: none of these is a change of history.
    """
    if ours["role"] != theirs["role"] or ours["content"].strip() != theirs["content"].strip():
        return False
    reasoning = theirs.get("reasoning_content")
    if reasoning and reasoning.strip() != ours.get("reasoning_content", "").strip():
        return False
    return _calls(ours) == _calls(theirs)


def difference(ours: Sequence[Message], theirs: Sequence[Message]) -> str:
    """Say where a history leaves another one, in words for a record."""
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if same(one, other):
            continue
        if one["role"] != other["role"]:
            return f"message {i} is of {other['role']}, and was of {one['role']}"
        what = "tool calls" if one["content"].strip() == other["content"].strip() else "text"
        return f"message {i} ({other['role']}) has another {what}"
    if len(theirs) < len(ours):
        return f"asked again after message {len(theirs) - 1}"
    return "goes on beside a turn that is being generated"


def n_same(ours: Sequence[Message], theirs: Sequence[Message]) -> int:
    """Return how many messages two histories share, from the first."""
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if not same(one, other):
            return i
    return min(len(ours), len(theirs))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind in _TEXT_PARTS:
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return text
    raise DataError(f"{where}: found {kind!r}; this endpoint takes text only, images and files are refused")


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: found no function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a client may send back what is no JSON: it stays text
            arguments = parse_json(arguments or "{}")
    if arguments is None:
        arguments = {}
    named = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def _calls(message: Message) -> list[Any]:
    return [call["function"] for call in message.get("tool_calls", ())]
