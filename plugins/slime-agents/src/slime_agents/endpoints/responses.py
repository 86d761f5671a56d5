"""OpenAI's Responses. As in `chat`, a policy is sampled as the run says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime_core.errors import DataError

from slime_agents.endpoints import chat
from slime_agents.endpoints.asking import (
    Ask,
    Event,
    Refused,
    counted,
    deltas,
    function_tool,
    listed,
    refuse_fields,
)
from slime_agents.tape.messages import Message, normal, text_of
from slime_agents.tape.turn import TapeTurn

_REFUSED: Mapping[str, Sequence[Any]] = {
    "tool_choice": ("auto", "none"),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled", "auto"),
    "text": ({"format": {"type": "text"}}, {}),
}


def read(body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> Ask:
    """Return what a request asks."""
    refuse_fields(body, _REFUSED)
    before: list[Message] = []
    if (previous := body.get("previous_response_id")) is not None:
        if previous not in earlier:
            raise DataError(
                f"previous_response_id: found {previous!r}; wanted the id of a response of this session"
            )
        before = list(earlier[previous])
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else listed(body, "input")
    messages = [*before, *_messages(items)]
    if (told := body.get("instructions")) is not None:
        messages = [message for message in messages if message["role"] != "system" or message not in before]
        messages.insert(0, {"role": "system", "content": text_of(told, "instructions")})
    tools = [_tool(one, f"tools[{i}]") for i, one in enumerate(listed(body, "tools"))]
    return Ask(
        messages=messages,
        tools=None if body.get("tool_choice") == "none" else tools or None,
        max_tokens=counted(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        model=str(body.get("model", "policy")),
        extra={"tools": listed(body, "tools"), "instructions": told, "previous": previous},
    )


def answer(ask: Ask, turn: TapeTurn, answer_id: str) -> dict[str, Any]:
    """Return the body of the answer."""
    cut = turn.finish_reason == "length"
    total = turn.n_prompt + turn.n_sampled
    return {
        **_head(ask, answer_id),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(turn, answer_id),
        "usage": {
            "input_tokens": turn.n_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": turn.n_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        },
    }


def events(ask: Ask, turn: TapeTurn, answer_id: str) -> Iterable[Event]:
    """Return the events of the answer."""
    whole = answer(ask, turn, answer_id)
    begun = {
        **_head(ask, answer_id),
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    last = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *(event for i, item in enumerate(whole["output"]) for event in _of_item(i, item)),
        {"type": last, "response": whole},
    ]
    for number, event in enumerate(told):
        yield event["type"], {**event, "sequence_number": number}


def error(refused: Refused) -> dict[str, Any]:
    """Return the body of a refusal."""
    return chat.error(refused)


def _of_item(i: int, item: dict[str, Any]) -> Iterable[dict[str, Any]]:
    at = {"item_id": item["id"], "output_index": i}
    if item["type"] == "message":
        part = item["content"][0]
        within = {**at, "content_index": 0}
        empty = {**part, "text": ""}
        yield {
            "type": "response.output_item.added",
            "output_index": i,
            "item": {**item, "status": "in_progress", "content": []},
        }
        yield {"type": "response.content_part.added", **within, "part": empty}
        for piece in deltas(part["text"]):
            yield {"type": "response.output_text.delta", **within, "delta": piece, "logprobs": []}
        yield {"type": "response.output_text.done", **within, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **within, "part": part}
    elif item["type"] == "function_call":
        yield {
            "type": "response.output_item.added",
            "output_index": i,
            "item": {**item, "status": "in_progress", "arguments": ""},
        }
        for piece in deltas(item["arguments"]):
            yield {"type": "response.function_call_arguments.delta", **at, "delta": piece}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **at, **done}
    else:
        yield {"type": "response.output_item.added", "output_index": i, "item": item}
    yield {"type": "response.output_item.done", "output_index": i, "item": item}


def _head(ask: Ask, answer_id: str) -> dict[str, Any]:
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": ask.model,
        "error": None,
        "instructions": ask.extra["instructions"],
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": ask.extra["previous"],
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": ask.extra["tools"],
    }


def _items(turn: TapeTurn, answer_id: str) -> list[dict[str, Any]]:
    message, calls = turn.message, turn.message.get("tool_calls", ())
    made: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        made.append({"type": "reasoning", "id": f"rs_{answer_id}", "summary": [], "content": content})
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        own = {"id": f"msg_{answer_id}", "role": "assistant", "status": "completed", "content": [part]}
        made.append({"type": "message", **own})
    for i, call in enumerate(calls):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        own = {"id": f"fc_{answer_id}_{i}", "call_id": call["id"], "name": call["function"]["name"]}
        made.append({"type": "function_call", **own, "arguments": arguments, "status": "completed"})
    return made


def _messages(items: Sequence[Any]) -> list[Message]:
    """Return messages of items; what the assistant said, thought and called in a row is one message."""
    made: list[Message] = []

    def assistant() -> Message:
        if not made or made[-1]["role"] != "assistant":
            made.append({"role": "assistant", "content": ""})
        return made[-1]

    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise DataError(f"{where}: found {type(item).__name__}; wanted an item")
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") == "assistant":
            assistant()["content"] += text_of(item.get("content"), where)
        elif kind == "message":
            made.append(normal({"role": item.get("role"), "content": item.get("content")}, where))
        elif kind == "function_call":
            call = {
                "id": item.get("call_id", ""),
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            read_call = normal({"role": "assistant", "tool_calls": [call]}, where)["tool_calls"]
            assistant().setdefault("tool_calls", []).extend(read_call)
        elif kind == "function_call_output":
            output = text_of(item.get("output"), where)
            made.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))})
        elif kind == "reasoning":
            parts = [one.get("text", "") for one in item.get("content") or [] if isinstance(one, Mapping)]
            if thought := "".join(parts):
                assistant()["reasoning_content"] = thought
        else:
            raise DataError(f"{where}: found an item of type {kind!r}, which this endpoint does not offer")
    return made


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise DataError(f"{where}: found {str(tool)[:60]!r}; wanted a tool of type function")
    return function_tool(tool, where)
