"""OpenAI's Chat Completions. A policy is sampled as the run says: temperature, top_p and seed of a request have no effect."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime_core.errors import DataError

from slime_agents.endpoints.asking import (
    Ask,
    Event,
    Refused,
    counted,
    deltas,
    function_tool,
    listed,
    refuse_fields,
    stops,
)
from slime_agents.tape.messages import Message, normal
from slime_agents.tape.turn import TapeTurn

_REFUSED: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "web_search_options": (),
}


def read(body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> Ask:
    """Return what a request asks."""
    refuse_fields(body, _REFUSED)
    messages = [normal(one, f"messages[{i}]") for i, one in enumerate(listed(body, "messages"))]
    tools = [_tool(one, f"tools[{i}]") for i, one in enumerate(listed(body, "tools"))]
    options = body.get("stream_options") or {}
    return Ask(
        messages=messages,
        tools=None if body.get("tool_choice") == "none" else tools or None,
        max_tokens=counted(body, "max_completion_tokens", "max_tokens"),
        stop=stops(body.get("stop"), "stop"),
        stream=bool(body.get("stream")),
        model=str(body.get("model", "policy")),
        extra={"usage": bool(isinstance(options, Mapping) and options.get("include_usage"))},
    )


def answer(ask: Ask, turn: TapeTurn, answer_id: str) -> dict[str, Any]:
    """Return the body of the answer."""
    message = {"role": "assistant", "content": turn.message["content"], "refusal": None}
    if "reasoning_content" in turn.message:
        message["reasoning_content"] = turn.message["reasoning_content"]
    if "tool_calls" in turn.message:
        message["tool_calls"] = [_call(call) for call in turn.message["tool_calls"]]
        message["content"] = message["content"] or None
    choice = {"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": None}
    return {**_head(ask, answer_id), "object": "chat.completion", "choices": [choice], "usage": _usage(turn)}


def events(ask: Ask, turn: TapeTurn, answer_id: str) -> Iterable[Event]:
    """Return the chunks of the answer."""
    head = {**_head(ask, answer_id), "object": "chat.completion.chunk"}

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return None, {**head, "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    for piece in deltas(turn.message.get("reasoning_content", "")):
        yield chunk({"reasoning_content": piece})
    for piece in deltas(turn.message["content"]):
        yield chunk({"content": piece})
    for i, call in enumerate(turn.message.get("tool_calls", ())):
        written = _call(call)
        name = {"name": written["function"]["name"], "arguments": ""}
        yield chunk({"tool_calls": [{"index": i, "id": call["id"], "type": "function", "function": name}]})
        for piece in deltas(written["function"]["arguments"]):
            yield chunk({"tool_calls": [{"index": i, "function": {"arguments": piece}}]})
    yield chunk({}, turn.finish_reason)
    if ask.extra["usage"]:
        yield None, {**head, "choices": [], "usage": _usage(turn)}
    yield None, "[DONE]"


def error(refused: Refused) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.kind}}


def _head(ask: Ask, answer_id: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "created": int(time.time()), "model": ask.model}


def _usage(turn: TapeTurn) -> dict[str, int]:
    total = turn.n_prompt + turn.n_sampled
    return {"prompt_tokens": turn.n_prompt, "completion_tokens": turn.n_sampled, "total_tokens": total}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise DataError(f"{where}: found {str(tool)[:60]!r}; wanted a tool of type function")
    return function_tool(tool.get("function"), where)
