"""Anthropic's Messages. As in `chat`, a policy is sampled as the run says."""

from __future__ import annotations

import json
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
from slime_agents.tape.messages import Message, normal, text_of
from slime_agents.tape.turn import TapeTurn

_REFUSED: Mapping[str, Sequence[Any]] = {"container": (), "mcp_servers": ([],), "output_config": ({},)}
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def read(body: Mapping[str, Any], earlier: Mapping[str, Sequence[Message]]) -> Ask:
    """Return what a request asks."""
    refuse_fields(body, _REFUSED)
    choice = (body.get("tool_choice") or {"type": "auto"}).get("type")
    if choice not in ("auto", "none"):
        raise DataError(
            f"tool_choice: found {choice!r}, which this endpoint does not offer; wanted auto or none"
        )
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"], "system")})
    for i, one in enumerate(listed(body, "messages")):
        messages += _messages(one, f"messages[{i}]")
    tools = [
        function_tool(one, f"tools[{i}]", parameters="input_schema")
        for i, one in enumerate(listed(body, "tools"))
    ]
    thinking = body.get("thinking")
    return Ask(
        messages=messages,
        tools=None if choice == "none" else tools or None,
        max_tokens=counted(body, "max_tokens"),
        stop=stops(body.get("stop_sequences"), "stop_sequences"),
        stream=bool(body.get("stream")),
        model=str(body.get("model", "policy")),
        extra={"thinking": isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive")},
    )


def answer(ask: Ask, turn: TapeTurn, answer_id: str) -> dict[str, Any]:
    """Return the body of the answer."""
    return {
        **_head(ask, answer_id),
        "content": _blocks(ask, turn),
        "stop_reason": _reason(turn, ask),
        "stop_sequence": turn.stop_string if turn.stop_string in ask.stop else None,
        "usage": {"input_tokens": turn.n_prompt, "output_tokens": turn.n_sampled},
    }


def events(ask: Ask, turn: TapeTurn, answer_id: str) -> Iterable[Event]:
    """Return the events of the answer."""
    whole = answer(ask, turn, answer_id)
    usage = {"input_tokens": turn.n_prompt, "output_tokens": 0}
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    told: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for i, block in enumerate(whole["content"]):
        told += _of_block(i, block)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    told.append({"type": "message_delta", "delta": ended, "usage": {"output_tokens": turn.n_sampled}})
    told.append({"type": "message_stop"})
    for event in told:
        yield event["type"], event


def error(refused: Refused) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = _KINDS.get(refused.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


def _of_block(i: int, block: dict[str, Any]) -> list[dict[str, Any]]:
    if block["type"] == "text":
        empty = {**block, "text": ""}
        pieces = [{"type": "text_delta", "text": piece} for piece in deltas(block["text"])]
    elif block["type"] == "thinking":
        empty = {**block, "thinking": ""}
        pieces = [{"type": "thinking_delta", "thinking": piece} for piece in deltas(block["thinking"])]
    else:
        empty = {**block, "input": {}}
        written = json.dumps(block["input"], ensure_ascii=False)
        pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in deltas(written)]
    return [
        {"type": "content_block_start", "index": i, "content_block": empty},
        *({"type": "content_block_delta", "index": i, "delta": piece} for piece in pieces),
        {"type": "content_block_stop", "index": i},
    ]


def _head(ask: Ask, answer_id: str) -> dict[str, Any]:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": ask.model}


def _reason(turn: TapeTurn, ask: Ask) -> str:
    if turn.finish_reason == "tool_calls":
        return "tool_use"
    if turn.finish_reason == "length":
        return "max_tokens"
    return "stop_sequence" if turn.stop_string in ask.stop else "end_turn"


def _blocks(ask: Ask, turn: TapeTurn) -> list[dict[str, Any]]:
    message = turn.message
    blocks: list[dict[str, Any]] = []
    if ask.extra["thinking"] and "reasoning_content" in message:
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"] or not message.get("tool_calls"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
        )
    return blocks


def _messages(message: Any, where: str) -> list[Message]:
    """Return the messages that one of theirs is: results of tools stand in one of the user's."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
        raise DataError(f"{where}: found {str(message)[:60]!r}; wanted a message of user or assistant")
    role, content = message["role"], message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise DataError(f"{where}: content is {type(content).__name__}; wanted text, or a list of blocks")
    return _said(blocks, where) if role == "assistant" else _asked(blocks, where)


def _said(blocks: Sequence[Any], where: str) -> list[Message]:
    text, calls, thought = "", [], ""
    for i, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            calls.append(
                {
                    "id": block.get("id"),
                    "function": {"name": block.get("name"), "arguments": block.get("input")},
                }
            )
        elif kind == "thinking":
            thought += str(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            text += text_of([block], f"{where}.content[{i}]")
    made = {"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": thought}
    return [normal(made, where)]


def _asked(blocks: Sequence[Any], where: str) -> list[Message]:
    made: list[Message] = []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            content = text_of(block.get("content"), place)
            made.append(
                {"role": "tool", "content": content, "tool_call_id": str(block.get("tool_use_id", ""))}
            )
        elif made and made[-1]["role"] == "user":
            made[-1]["content"] += text_of([block], place)
        else:
            made.append({"role": "user", "content": text_of([block], place)})
    return made or [{"role": "user", "content": ""}]
